"""Trains a classifier of handwritten digits that reads an image as a sequence of 64 pixels.

    python examples/gla_digits.py [--seed 0] [--epochs 15]

The classifier is one block of gated linear attention (Yang et al., arXiv:2312.06635) whose gates are learned.
The state between chunks comes from `registry.get("chunk_fwd_h")`, and its gradients with it; attention inside
of a chunk is plain `jax.numpy`. Data are the 1,797 images that scikit-learn brings along. Writes nothing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from opmux import registry

Params = dict[str, jax.Array]

PIXELS, CLASSES = 64, 10
WIDTH, HEADS, HEAD_DIM, CHUNK = 48, 3, 16, 8
BATCH = 64
SLOWEST_GATE = 1 / 8
"""Factor of the log gates, so that a fresh model remembers more than a few pixels."""


@dataclass(frozen=True)
class Result:
    """Accuracy on the images that were held back, seconds of training, and the backend that ran `chunk_fwd_h`."""

    accuracy: float
    seconds: float
    backend: str


def gated_linear_attention(q: jax.Array, k: jax.Array, v: jax.Array, log_gates: jax.Array) -> jax.Array:
    """`o_t = q_t S_t` with `S_t = exp(log_gates_t) S_{t-1} + k_t v_t^T`, chunk by chunk.

    Args:
      q: queries, [B, T, H, K], where T is a multiple of the chunk size.
      k: keys, [B, T, H, K].
      v: values, [B, T, H, V].
      log_gates: logs of the decay of the key channels, [B, T, H, K].

    Returns:
      Outputs, [B, T, H, V].
    """
    states, _ = registry.get("chunk_fwd_h")(k, v, gk=log_gates, chunk_size=CHUNK, gates="raw")
    B, T, H, _ = q.shape
    q, k, v, log_gates = (array.reshape(B, T // CHUNK, CHUNK, H, -1) for array in (q, k, v, log_gates))
    decay = jnp.cumsum(log_gates, axis=2)

    across = jnp.einsum("bcrhk,bchkv->bcrhv", q * jnp.exp(decay), states)
    # Later tokens would have positive exponents, which overflow: they are masked before exp, not after.
    seen = jnp.tri(CHUNK, dtype=bool)[:, :, None, None]
    since = jnp.where(seen, decay[:, :, :, None] - decay[:, :, None], -jnp.inf)
    scores = jnp.einsum("bcrhk,bcshk,bcrshk->bcrsh", q, k, jnp.exp(since))
    within = jnp.einsum("bcrsh,bcshv->bcrhv", scores, v)
    return (across + within).reshape(B, T, H, -1)


def initial_params(seed: int) -> Params:
    """Weights of a fresh model."""
    rng = np.random.default_rng(seed)

    def weights(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((rows, columns)) / rows**0.5, jnp.float32)

    inner = HEADS * HEAD_DIM
    return {
        "pixel": weights(1, WIDTH),
        "position": weights(PIXELS, WIDTH),
        **{name: weights(WIDTH, inner) for name in ("query", "key", "value", "gate")},
        "out": weights(inner, WIDTH),
        "up": weights(WIDTH, 2 * WIDTH),
        "down": weights(2 * WIDTH, WIDTH),
        "classes": weights(WIDTH, CLASSES),
    }


def logits(params: Params, images: jax.Array) -> jax.Array:
    """Scores of the classes, [B, 10], of images [B, 64] with pixels from 0 to 1."""
    x = images[..., None] @ params["pixel"] + 8 * params["position"]
    normal = _normalised(x)
    q, k, v, gate = (
        (normal @ params[name]).reshape(*images.shape, HEADS, HEAD_DIM) for name in ("query", "key", "value", "gate")
    )
    attended = gated_linear_attention(q * HEAD_DIM**-0.5, k, v, SLOWEST_GATE * jax.nn.log_sigmoid(gate))
    x = x + _normalised(attended).reshape(*images.shape, -1) @ params["out"]
    x = x + jax.nn.gelu(_normalised(x) @ params["up"]) @ params["down"]
    return _normalised(x.mean(1)) @ params["classes"]


def _normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy."""
    log_probabilities = jax.nn.log_softmax(logits(params, images))
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=1).mean()


@jax.jit
def train_step(
    params: Params, moments: tuple[Params, Params], step: float, rate: float, images: Any, labels: Any
) -> tuple[Params, tuple[Params, Params], jax.Array]:
    """One step of Adam (Kingma and Ba, arXiv:1412.6980)."""
    value, gradient = jax.value_and_grad(loss)(params, images, labels)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments[1], gradient)

    def moved(parameter: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        return parameter - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.99**step)) + 1e-8)

    return jax.tree.map(moved, params, first, second), (first, second), value


@jax.jit
def accuracy(params: Params, images: Any, labels: Any) -> jax.Array:
    """Share of the images whose class has the highest score."""
    return (logits(params, images).argmax(-1) == labels).mean()


def train(seed: int = 0, epochs: int = 15, *, learning_rate: float = 4e-3, report: Any = print) -> Result:
    """Trains a model and measures it on a fifth of the images, which it never sees in training.

    Args:
      seed: of the weights, of the images held back, and of the order of the others.
      epochs: passes over the training images.
      learning_rate: of the first step; it falls along a cosine.
      report: takes each line of progress.
    """
    digits: Any = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=seed
    )
    heads = jax.ShapeDtypeStruct((BATCH, PIXELS, HEADS, HEAD_DIM), jnp.float32)
    decision = registry.explain("chunk_fwd_h", heads, heads, gk=heads, chunk_size=CHUNK, gates="raw")
    report(f"chunk_fwd_h runs on {decision.backend}: {decision.reason}")
    report(f"{len(train_images)} images to train on, {len(test_images)} held back")

    rng = np.random.default_rng(seed)
    params = initial_params(seed)
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments = zeros, zeros
    steps = len(train_images) // BATCH
    begun = time.perf_counter()
    score = float(accuracy(params, test_images, test_labels))
    for epoch in range(epochs):
        order = rng.permutation(len(train_images))
        total = 0.0
        for number in range(steps):
            picked = order[number * BATCH : (number + 1) * BATCH]
            done = epoch * steps + number
            rate = learning_rate * 0.5 * (1 + np.cos(np.pi * done / (epochs * steps)))
            params, moments, value = train_step(
                params, moments, float(done + 1), rate, train_images[picked], train_labels[picked]
            )
            total += float(value)
        score = float(accuracy(params, test_images, test_labels))
        report(f"epoch {epoch + 1:>3}  loss {total / steps:.4f}  test accuracy {score:.1%}")
    seconds = time.perf_counter() - begun
    report(f"test accuracy {score:.1%} after {seconds:.0f} s")
    return Result(score, seconds, decision.backend)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; the exit code is 0 if at least 95 % of the images held back are classified rightly."""
    parser = argparse.ArgumentParser(description="Gated linear attention reads handwritten digits pixel by pixel.")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order (default: 0)")
    parser.add_argument("--epochs", type=int, default=15, help="passes over the training images (default: 15)")
    chosen = parser.parse_args(argv)
    return 0 if train(chosen.seed, chosen.epochs).accuracy >= 0.95 else 1


if __name__ == "__main__":
    raise SystemExit(main())

"""The executable specification of `attention`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.ops.attention_mask import AttentionParams, hides, visible
from opmux.core.request import Operands, Outputs, Request


def accumulator(dtype: Any) -> np.dtype[Any]:
    """Float64 for float64 inputs, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def reference(request: Request, operands: Operands) -> Outputs:
    """The specification: every score at once, O(T S) memory.

    NaN and Inf must reach exactly the rows that see them, and products would spread them (0 * NaN). Where every row
    sees every key they may; elsewhere inputs that are not finite take a form that is careful, and slower.
    """
    if not hides(request):
        return _attend(request, operands, None)
    seen = visible(request, operands)
    checked = [operands[name] for name in ("query", "key", "value")]
    if "bias" in operands:
        seen = seen & (operands["bias"] != -jnp.inf)
        checked.append(jnp.where(seen, operands["bias"], 0))
    finite = _finite(*(lax.stop_gradient(array) for array in checked))
    return lax.cond(finite, partial(_attend, request), partial(_attend_carefully, request), operands, seen)


@jax.custom_batching.custom_vmap
def _finite(*arrays: jax.Array) -> jax.Array:
    """Whether no entry of any array is NaN or Inf."""
    return jnp.stack([jnp.isfinite(array).all() for array in arrays]).all()


@_finite.def_vmap
def _(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
    # One answer for the whole batch: to choose for each element means to compute both forms.
    return _finite(*arrays), False


def _attend(request: Request, operands: Operands, seen: jax.Array | None) -> Outputs:
    """For finite operands, or if every row sees every key (`seen` is None)."""
    scores = _scores(request, operands, seen)
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    top = lax.stop_gradient(scores.max(-1, keepdims=True, initial=-jnp.inf))
    top = jnp.where(top == -jnp.inf, 0, top)  # of a row that sees nothing
    weights = jnp.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    some = total != 0
    total = jnp.where(some, total, 1)
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)
    return _outputs(request, _weigh(weights / total, operands["value"]), lse)


@partial(jax.checkpoint, static_argnums=(0,))
def _attend_carefully(request: Request, operands: Operands, seen: jax.Array) -> Outputs:
    """For operands with NaN or Inf.

    Products read cleaned operands; a non-finite query or key poisons its scores instead, and a value its rows.
    Nothing is kept for the backward: finite operands would have to fill it with zeros.
    """
    cleaned, bad = dict(operands), {}
    for name in ("query", "key", "value"):
        bad[name] = ~jnp.isfinite(operands[name])
        cleaned[name] = jnp.where(bad[name], 0, operands[name])
    N, K = request["query"].shape[2], request["key"].shape[2]
    scores = _scores(request, cleaned, seen)
    q_bad = bad["query"].any(-1).transpose(0, 2, 1)[..., None]
    k_bad = jnp.repeat(bad["key"].any(-1).transpose(0, 2, 1), N // K, axis=1)[:, :, None]
    scores = jnp.where(q_bad | k_bad, jnp.nan, scores)

    seen = jnp.broadcast_to(seen, scores.shape)
    some = seen.any(-1, keepdims=True)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-jnp.inf))
    top = jnp.where(some, top, 0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0)), 0)
    total = jnp.where(some, weights.sum(-1, keepdims=True), 1)
    lse = jnp.where(some, jnp.log(total) + top, -jnp.inf)
    # 0 for a key that a row does not see, even if the row is NaN: its own gradient must not be.
    out = _weigh(jnp.where(seen, weights / total, 0), cleaned["value"])
    hit = _weigh(seen.astype(jnp.float32), bad["value"].astype(jnp.float32)) > 0
    return _outputs(request, out + jnp.where(hit, jnp.nan, 0).astype(out.dtype), lse)


def _scores(request: Request, operands: Operands, seen: jax.Array | None) -> jax.Array:
    """Scores before the mask, [B, N, T, S]."""
    params: AttentionParams = request.params
    query, key = operands["query"], operands["key"]
    acc = accumulator(query.dtype)
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    grouped = query.reshape(B, T, K, N // K, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=acc, precision=lax.Precision.HIGHEST)
    scores = scores.reshape(B, N, T, S) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * jnp.tanh(scores / params.soft_cap)
    if "bias" in operands and seen is not None:
        scores = scores + jnp.where(seen, operands["bias"].astype(acc), 0)
    return scores


def _weigh(weights: jax.Array, value: jax.Array) -> jax.Array:
    """Sums of the values by their weights, [B, T, K, N // K, Hv].

    Rounded like any attention in 16 bits: the weights enter the product in the inputs' dtype.
    """
    B, N, T, S = weights.shape
    K = value.shape[2]
    weights = weights.reshape(B, K, N // K, T, S).astype(value.dtype)
    return jnp.einsum(
        "bkgts,bskv->btkgv", weights, value,
        preferred_element_type=accumulator(value.dtype), precision=lax.Precision.HIGHEST,
    )  # fmt: skip


def _outputs(request: Request, out: jax.Array, lse: jax.Array) -> Outputs:
    B, T, N = request["query"].shape[:3]
    out = out.reshape(B, T, N, out.shape[-1]).astype(request["query"].dtype)
    return {"out": out, "lse": lse[..., 0].transpose(0, 2, 1)}

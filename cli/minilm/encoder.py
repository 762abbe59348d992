"""The encoder of all-MiniLM-L6-v2: a BERT whose every product, sum, reduction and attention is an opmux op.

    token ids ──► embed ──► layer × 6 ──► mean over tokens ──► unit length
                              │
                 ┌────────────┴─────────────────────────────────────┐
              x ─┼─► attention ─► + ─► normalize ─► feed forward ─► + ─► normalize ─► x
                 └────────────────┘         └────────────────────────┘

Nothing here says which backend runs: `registry` decides, per op, where the arrays live.

Axes: B sentences, T tokens, D = 384 features, N = 12 heads, H = 32 features a head, F = 1536, E embeddings.
Source: Devlin et al. 2018, arXiv:1810.04805 (layers normalized after each sum, as published there); Wang et al. 2020,
arXiv:2002.10957 (the sizes); Reimers and Gurevych 2019, arXiv:1908.10084 (pooling).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from opmux import registry

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int

HEADS = 12
EPSILON = 1e-12

add = registry.get("add")
matmul = registry.get("matmul")
reduce = registry.get("reduce")
attention = registry.get("attention")


class Linear(NamedTuple):
    """An affine map of the last axis."""

    weight: Float[Array, "*L In Out"]
    bias: Float[Array, "*L Out"]


class Norm(NamedTuple):
    """Scale and shift of a layer normalization."""

    scale: Float[Array, "*L D"]
    shift: Float[Array, "*L D"]


class Layer(NamedTuple):
    """One transformer layer, or several stacked on a leading axis L."""

    query: Linear
    key: Linear
    value: Linear
    out: Linear
    attention_norm: Norm
    up: Linear
    down: Linear
    feed_forward_norm: Norm


class Params(NamedTuple):
    """All weights; a pytree."""

    words: Float[Array, "V D"]
    positions: Float[Array, "P D"]
    types: Float[Array, "2 D"]
    norm: Norm
    layers: Layer


def encode(
    params: Params, token_ids: Int[Array, "B T"], mask: Int[Array, "B T"], type_ids: Int[Array, "B T"]
) -> Float[Array, "B D"]:
    """Embeds sentences.

    Args:
      params: the weights; their dtype is the dtype of the computation.
      token_ids: WordPiece ids, T at most 512.
      mask: 1 for tokens, 0 for the padding after them.
      type_ids: 0 for the first sentence of a pair, 1 for the second.

    Returns:
      Embeddings of unit length, so that a dot product is a cosine.
    """
    positions = params.positions[: token_ids.shape[1]]
    x = add(add(params.words[token_ids], params.types[type_ids]), positions)
    x = normalize(x, params.norm)

    lengths = reduce(mask, kind="sum", axis=1)
    # Scanned, so that one layer is compiled instead of six.
    x, _ = jax.lax.scan(lambda x, one: (layer(x, lengths, one), None), x, params.layers)

    tokens = mask[:, :, None].astype(x.dtype)
    pooled = reduce(x * tokens, kind="sum", axis=1) / lengths[:, None].astype(x.dtype)
    return pooled / jnp.sqrt(reduce(pooled * pooled, kind="sum", axis=-1, keepdims=True))


def layer(x: Float[Array, "B T D"], lengths: Int[Array, " B"], params: Layer) -> Float[Array, "B T D"]:
    """One transformer layer."""
    x = normalize(add(x, self_attention(x, lengths, params)), params.attention_norm)
    hidden = jax.nn.gelu(linear(x, params.up), approximate=False)
    return normalize(add(x, linear(hidden, params.down)), params.feed_forward_norm)


def self_attention(x: Float[Array, "B T D"], lengths: Int[Array, " B"], params: Layer) -> Float[Array, "B T D"]:
    """Multi-head attention of every token to the tokens that are no padding."""
    query, key, value = (split_heads(linear(x, each)) for each in (params.query, params.key, params.value))
    seen = attention(query, key, value, key_value_seq_lengths=lengths)
    return linear(seen.reshape(x.shape), params.out)


def split_heads(x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
    """[B, T, D] as [B, T, N, H]."""
    return x.reshape(*x.shape[:2], HEADS, -1)


def linear(x: Float[Array, "*B In"], params: Linear) -> Float[Array, "*B Out"]:
    """`x @ weight + bias`."""
    return add(matmul(x, params.weight), params.bias)


def normalize(x: Float[Array, "*B D"], params: Norm) -> Float[Array, "*B D"]:
    """Layer normalization over the last axis."""
    mean = reduce(x, kind="mean", axis=-1, keepdims=True)
    centered = add(x, -mean)
    variance = reduce(centered * centered, kind="mean", axis=-1, keepdims=True)
    return add(centered * jax.lax.rsqrt(add(variance, EPSILON)) * params.scale, params.shift)


def decisions(params: Params, batch: int, length: int) -> dict[str, registry.Decision]:
    """What the registry decides for one typical call of each op at these sizes; runs nothing."""

    def array(*shape: int, dtype: Any = params.words.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    features = params.words.shape[1]
    x = array(batch, length, features)
    heads = array(batch, length, HEADS, features // HEADS)
    lengths = array(batch, dtype=jnp.int32)
    return {
        "matmul": registry.explain("matmul", x, array(*params.layers.up.weight.shape[1:])),
        "add": registry.explain("add", x, x),
        "reduce": registry.explain("reduce", x, kind="mean", axis=-1, keepdims=True),
        "attention": registry.explain("attention", heads, heads, heads, key_value_seq_lengths=lengths),
    }

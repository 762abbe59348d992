"""Interpreted Pallas attention, forward: online softmax over key blocks (Milakov and Gimelshein 2018; Dao et al. 2022).

    one block of queries      keys, values
    [batch, heads, G, q, H]   [batch, heads, S, H]
              │                    │ one block of keys at a time, unseen blocks skipped
              ▼                    ▼
         scores [batch heads, G q, kv] ── top, total, out: rescaled and added to

A row whose keys are all unseen has a total of 0, and gets 0 and a log-sum-exp of -inf at the end.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.indices import Scalar
from opmux.core.ops.attention import AttentionParams, without_scores
from opmux.core.ops.attention import outputs as output_specs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.interpret.attention_blocks import Blocks, grid_start, masks, product, with_channels
from opmux.plugins.interpret.attention_config import AttentionConfig
from opmux.plugins.interpret.attention_view import View

# Scores of a block up to which two products cost less than to choose between one and two.
_TWO_PRODUCTS = 2**11


def attention(request: Request, operands: Operands, config: AttentionConfig) -> Outputs:
    """`out` and `lse` of a canonical attention, in O(T + S) memory beside the bias and mask."""
    trivial = without_scores(request)
    if trivial is not None:
        return trivial
    specs = output_specs(request)
    blocks = Blocks.of(request, config)

    def load(name: str) -> jax.Array:
        # Infinite entries count as NaN, so that any product with them is NaN for the rows that see them.
        array = operands[name].astype(_stored(blocks))
        return with_channels(jnp.where(jnp.isfinite(array), array, jnp.nan))

    scale = request.params.scale if _scales_queries(blocks) else 1
    arrays = {
        "query": blocks.rows(load("query") * scale),
        "key": blocks.keys(load("key")),
        "value": blocks.keys(load("value")),
        **masks(blocks, operands),
    }
    tile = (blocks.batch, blocks.heads, blocks.G, blocks.q)
    out, lse = pl.pallas_call(
        lambda *refs: _kernel(blocks, dict(zip(arrays, refs, strict=False)), *refs[len(arrays) :]),
        out_shape=[
            jax.ShapeDtypeStruct((blocks.B, blocks.K, blocks.G, blocks.T_padded, blocks.value_channels), blocks.dtype),
            jax.ShapeDtypeStruct((blocks.B, blocks.K, blocks.G, blocks.T_padded), blocks.dtype),
        ],
        grid=blocks.grid,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
        out_specs=[
            pl.BlockSpec((*tile, blocks.value_channels), lambda b, h, t: (b, h, 0, t, 0)),
            pl.BlockSpec(tile, lambda b, h, t: (b, h, 0, t)),
        ],
        interpret=True,
        name="attention",
    )(*arrays.values())
    return {"out": blocks.unrows(out)[..., : blocks.Hv].astype(specs["out"].dtype), "lse": blocks.unrows(lse)}


def _kernel(blocks: Blocks, refs: dict[str, Any], out_ref: Any, lse_ref: Any) -> None:
    params: AttentionParams = blocks.request.params
    view = View(blocks, refs, *(grid_start(blocks, axis) for axis in range(3)))
    query = view.queries("query")

    def step(s: Scalar, masked: bool, carry: Any) -> Any:
        scores = product(query, view.keys("key", s), transposed=True)
        if not _scales_queries(blocks):
            scores = scores * params.scale
        if params.soft_cap is not None:
            scores = params.soft_cap * jnp.tanh(scores / params.soft_cap)
        if "bias" in refs:
            scores = scores + view.bias(s)
        if masked:
            scores = jnp.where(view.seen(s), scores, -jnp.inf)

        top = scores.max(-1, keepdims=True)
        if carry is not None:
            top = jnp.maximum(carry[0], top)
        # A row that has seen nothing yet has weights exp(-inf - 0).
        shift = jnp.where(top == -jnp.inf, 0, top)
        weights = jnp.exp(scores - shift)
        total = weights.sum(-1, keepdims=True)
        value = view.keys("value", s)
        out = _weigh_masked(view, s, weights, value) if masked else product(weights.astype(value.dtype), value)
        if carry is not None:
            old = jnp.exp(carry[0] - shift)
            total, out = carry[1] * old + total, carry[2] * old + out
        return top, total, out

    def empty() -> Any:
        zeros = jnp.zeros((*query.shape[:2], blocks.value_channels), blocks.dtype)
        return jnp.full_like(zeros[..., :1], -jnp.inf), zeros[..., :1], zeros

    top, total, out = view.walk(step, empty)

    some = total != 0
    valid = view.valid_rows()
    if valid is not None:
        some = some & valid
    total = jnp.where(some, total, 1)
    out_ref[...] = jnp.where(some, out * (1 / total), 0).reshape(out_ref.shape)
    lse_ref[...] = jnp.where(some, top + jnp.log(total), -jnp.inf).reshape(lse_ref.shape)


def _weigh_masked(view: View, s: Scalar, weights: jax.Array, value: jax.Array) -> jax.Array:
    """`weights @ value` where NaN in a value reaches the rows that see it and no other, though 0 * NaN is NaN."""
    bad = jnp.isnan(value)
    weights = weights.astype(value.dtype)

    def poisoned() -> jax.Array:
        hit = product(view.seen(s).astype(weights.dtype), bad.astype(weights.dtype)) > 0
        return jnp.where(hit, jnp.nan, product(weights, jnp.where(bad, 0, value)))

    if weights.size <= _TWO_PRODUCTS:
        return poisoned()
    return lax.cond(bad.any(), poisoned, lambda: product(weights, value))


def _stored(blocks: Blocks) -> Any:
    """Dtype of the factors of products: CPUs that multiply bfloat16 do so faster than float32, but not float16."""
    dtype = blocks.request["query"].dtype
    return dtype if dtype == jnp.bfloat16 else blocks.dtype


def _scales_queries(blocks: Blocks) -> bool:
    """Whether scaling the queries rather than the scores costs no accuracy."""
    return _stored(blocks) == blocks.dtype or abs(math.frexp(blocks.request.params.scale)[0]) == 0.5

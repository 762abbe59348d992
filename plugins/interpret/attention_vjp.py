"""Interpreted Pallas attention, backward: weights are made again block by block (Dao et al. 2022, algorithm 4).

    weights   = exp(scores - lse)
    d_scores  = weights * (d_out @ value^T - delta),   delta = sum(d_out * out) - d_lse, for each row

    for each block of queries, each block of keys that it sees:
         d_value^T += d_out^T @ weights            kept transposed: contracting rows
         d_key^T   += query^T @ d_scores           of a large left operand is slow
         d_query   += d_scores @ key

One pass makes all of them, so scores are computed once.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.indices import Scalar
from opmux.core.ops.attention import AttentionParams, without_scores
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.interpret.attention_blocks import Blocks, grid_start, masks, product, with_channels
from opmux.plugins.interpret.attention_config import AttentionConfig
from opmux.plugins.interpret.attention_view import View, loop


def attention_vjp(request: Request, operands: Operands, config: AttentionConfig) -> Outputs:
    """Cotangents of the wanted operands, in O(T + S) memory beside the bias, its cotangent and the mask."""
    trivial = without_scores(request)
    if trivial is not None:
        return trivial
    blocks = Blocks.of(request, config)
    arrays = {**_saved(blocks, operands), **masks(blocks, operands)}
    B, K, G, T, S = blocks.B, blocks.K, blocks.G, blocks.T_padded, blocks.S_padded
    whole: dict[str, tuple[int, ...]] = {
        "query": (B, K, G, T, blocks.channels),
        "key": (B, K, blocks.channels, S),
        "value": (B, K, blocks.value_channels, S),
    }
    if "bias" in arrays:
        whole["bias"] = arrays["bias"].shape

    def spec(name: str) -> pl.BlockSpec:
        if name == "bias":
            return pl.BlockSpec(memory_space=pl.ANY)
        tail = whole[name][2:]
        return pl.BlockSpec((blocks.batch, blocks.heads, *tail), lambda b, h: (b, h, *(0,) * len(tail)))

    results = pl.pallas_call(
        lambda *refs: _kernel(
            blocks, dict(zip(arrays, refs, strict=False)), dict(zip(request.wanted, refs[len(arrays) :], strict=True))
        ),
        out_shape=[jax.ShapeDtypeStruct(whole[name], blocks.dtype) for name in request.wanted],
        grid=blocks.grid[:2],
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(arrays),
        out_specs=[spec(name) for name in request.wanted],
        interpret=True,
        name="attention_vjp",
    )(*arrays.values())
    undo = {"query": blocks.unrows, "key": _unkeys, "value": _unkeys, "bias": _unscores}
    return {
        name: _cut(undo[name](result), request[name].shape).astype(request[name].dtype)
        for name, result in zip(request.wanted, results, strict=True)
    }


def _saved(blocks: Blocks, operands: Operands) -> dict[str, jax.Array]:
    """What the kernel reads besides masks, so laid out that no row's NaN can reach another one.

    NaN and infinite inputs are cleared: a row that sees one has NaN in `lse` or `out`, which makes its own
    cotangents and those of every key that it sees NaN, and no others. An empty row has no weights and no cotangents.
    """
    dtype = blocks.dtype
    lse = operands["lse"].astype(dtype)
    empty = lse == -jnp.inf
    out = operands["out"].astype(dtype)
    d_out = operands["d_out"].astype(dtype) if "d_out" in operands else jnp.zeros_like(out)
    d_out = jnp.where(empty[..., None], 0, d_out)
    delta = (d_out * out).sum(-1)
    if "d_lse" in operands:
        delta = delta - jnp.where(empty, 0, operands["d_lse"].astype(dtype))

    def load(name: str) -> jax.Array:
        array = operands[name].astype(dtype)
        return with_channels(jnp.where(jnp.isfinite(array), array, 0))

    query, d_out = blocks.rows(load("query") * blocks.request.params.scale), blocks.rows(with_channels(d_out))
    # Left operands of products that contract rows. XLA would fold the transpose back into these products, which then
    # take twice as long.
    query_t, d_out_t = lax.optimization_barrier((jnp.moveaxis(query, 4, 2), jnp.moveaxis(d_out, 4, 2)))
    return {
        "query": query,
        "key": blocks.keys(load("key")),
        "value": blocks.keys(load("value")),
        "d_out": d_out,
        "query_t": query_t,
        "d_out_t": d_out_t,
        "lse": blocks.rows(jnp.where(empty, jnp.inf, lse), fill=jnp.inf),
        "delta": blocks.rows(delta),
    }


def _kernel(blocks: Blocks, refs: dict[str, Any], outs: dict[str, Any]) -> None:
    params: AttentionParams = blocks.request.params
    for name in ("key", "value"):
        if name in outs:
            outs[name][...] = jnp.zeros(outs[name].shape, blocks.dtype)
    if "bias" in outs:

        @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
        def _() -> None:
            outs["bias"][...] = jnp.zeros(outs["bias"].shape, blocks.dtype)

    b, h = (grid_start(blocks, axis) for axis in range(2))

    def rows(i: Scalar, carry: Any) -> Any:
        view = View(blocks, refs, b, h, i * blocks.q)
        query, d_out, lse, delta = (view.queries(name) for name in ("query", "d_out", "lse", "delta"))
        query_t, d_out_t = view.queries_t("query_t"), view.queries_t("d_out_t")

        def step(s: Scalar, masked: bool, d_query: jax.Array | None) -> Any:
            key, value = view.keys("key", s), view.keys("value", s)
            scores = product(query, key, transposed=True)
            capped = None
            if params.soft_cap is not None:
                capped = jnp.tanh(scores / params.soft_cap)
                scores = params.soft_cap * capped
            if "bias" in refs:
                scores = scores + view.bias(s)
            weights = jnp.exp(scores - lse[..., None])
            d_scores = product(d_out, value, transposed=True) - delta[..., None]
            if masked:
                seen = view.seen(s)
                weights = jnp.where(seen, weights, 0)
                d_scores = jnp.where(seen, d_scores, 0)
            d_scores = weights * d_scores
            if "value" in outs:
                _add(outs["value"], s, product(d_out_t, weights))
            if "bias" in outs:
                at = view.at("bias", s)
                alone = tuple(i for i, size in enumerate(outs["bias"].shape) if size == 1)
                split = d_scores.reshape(blocks.batch, blocks.heads, blocks.G, blocks.q, blocks.kv)
                outs["bias"][at] += split.sum(alone, keepdims=True)
            if capped is not None:
                d_scores = d_scores * (1 - capped * capped)
            if "key" in outs:
                _add(outs["key"], s, product(query_t, d_scores))
            if "query" not in outs:
                return d_query
            more = product(d_scores, key)
            return more if d_query is None else d_query + more

        d_query = view.walk(step, lambda: jnp.zeros(query.shape, blocks.dtype))
        if "query" in outs:
            d_query = (d_query * params.scale).reshape(blocks.batch, blocks.heads, blocks.G, blocks.q, -1)
            outs["query"][:, :, :, pl.ds(view.t, blocks.q)] = d_query
        return carry

    loop(0, blocks.T_padded // blocks.q, rows, ())


def _add(ref: Any, s: Scalar, more: jax.Array) -> None:
    """Adds [batch heads, channels, kv] to the keys from `s` on of [batch, heads, channels, S_padded]."""
    at = (slice(None), slice(None), slice(None), pl.ds(s, more.shape[-1]))
    ref[at] += more.reshape(*ref.shape[:3], more.shape[-1])


def _unkeys(array: jax.Array) -> jax.Array:
    """[B, K, H, S_padded] to [B, S_padded, K, H]."""
    return array.transpose(0, 3, 1, 2)


def _unscores(array: jax.Array) -> jax.Array:
    """[#B, #K, #G, T, S] to [#B, #N, T, S]."""
    return array.reshape(array.shape[0], -1, *array.shape[3:])


def _cut(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array without the padding at its ends."""
    return array[tuple(slice(size) for size in shape)]

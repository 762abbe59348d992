"""`attention_vjp` as a Mosaic TPU kernel: weights are made again block by block (Dao et al. 2022, algorithm 4).

    weights  = 2^(scores - lse)
    d_scores = weights * (value @ d_out^T - delta),   delta = sum(d_out * out) - d_lse, for each row

One pass makes the cotangents of queries, keys and values, so scores and exponentials are computed once. The grid is
that of the forward; the cotangent of a block of queries is complete after its last block of keys, and those of all
keys of a key/value head stay in VMEM, in float32, until the last block of the last query head that reads them:

    for each query head of a key/value head, each block of queries, each block of keys that it sees:
         d_query^T [H, q]     += key^T @ d_scores        ──► out after the last block of keys
         d_key     [S, H]     += d_scores @ query        ┐
         d_value   [S, Hv]    += weights @ d_out         ┴─► out with the last block of queries

Keys too many to stay in VMEM are taken in spans, one call each, whose cotangents of queries are added up. As in the
forward, keys lie down sublanes and query rows across lanes.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core.config import Config
from opmux.core.indices import Scalar
from opmux.core.ops.attention import without_scores
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu import attention_operands as lay
from opmux.plugins.mosaic_tpu.attention_config import AttentionVjpConfig
from opmux.plugins.mosaic_tpu.attention_tile import Exponent, Tile
from opmux.plugins.mosaic_tpu.attention_tiling import Tiling, all_of, opposite, when
from opmux.plugins.mosaic_tpu.attention_vjp_bias import bias_cotangent
from opmux.plugins.mosaic_tpu.attention_vjp_tile import place_saved, weights_and_cotangents


def attention_vjp(request: Request, operands: Operands, config: Config) -> Outputs:
    """Cotangents of the wanted operands, in O(T + S) memory beside the bias, its cotangent and the mask.

    Args:
      request: a request of `attention_vjp`.
      operands: those of the forward, `out`, `lse`, and `d_out` or `d_lse` or both.
      config: an `AttentionVjpConfig`.
    """
    config = cast(AttentionVjpConfig, config)
    trivial = without_scores(request)
    if trivial is not None:
        return trivial
    saved = _saved(request, operands)
    found: Outputs = {}
    if "bias" in request.wanted:
        found["bias"] = bias_cotangent(request, operands, saved, config)
    wanted = tuple(name for name in request.wanted if name != "bias")
    if wanted:
        S = request["key"].shape[1]
        spans = [(start, min(start + config.span_kv, S)) for start in range(0, S, config.span_kv)]
        parts = [_of_span(request, operands, saved, config, wanted, span, len(spans) == 1) for span in spans]
        for name in wanted:
            pieces = [part[name] for part in parts]
            whole = sum(pieces[1:], pieces[0]) if name == "query" else jnp.concatenate(pieces, axis=1)
            found[name] = whole[..., : request[name].shape[-1]].astype(request[name].dtype)
    return found


def _saved(request: Request, operands: Operands) -> dict[str, jax.Array]:
    """What the kernels read besides masks, so that no row's NaN can reach another one.

    NaN and infinite inputs are cleared: a row that sees one has NaN in `lse` or `out`, which makes its own
    cotangents and those of every key that it sees NaN, and no others. An empty row has no weights and no cotangents.
    """
    dtype = lay.working_dtype(request["query"].dtype)
    lse = operands["lse"].astype(jnp.float32)
    empty = lse == -jnp.inf
    out = operands["out"].astype(jnp.float32)
    d_out = operands["d_out"] if "d_out" in operands else jnp.zeros(out.shape, dtype)
    d_out = jnp.where(empty[..., None], 0, d_out)
    delta = (d_out.astype(jnp.float32) * out).sum(-1)
    if "d_lse" in operands:
        delta = delta - jnp.where(empty, 0, operands["d_lse"].astype(jnp.float32))

    def load(name: str) -> jax.Array:
        array = operands[name].astype(dtype)
        return lay.with_channels(jnp.where(jnp.isfinite(array), array, 0))

    unit = Exponent(request.params, "bias" in request).unit
    return {
        **{name: load(name) for name in ("query", "key", "value")},
        "d_out": lay.with_channels(d_out.astype(dtype)),
        "lse": jnp.where(empty, jnp.inf, lse * unit),
        "delta": delta,
    }


def _of_span(
    request: Request,
    operands: Operands,
    saved: dict[str, jax.Array],
    config: AttentionVjpConfig,
    wanted: tuple[str, ...],
    span: tuple[int, int],
    alone: bool,
) -> Outputs:
    """Cotangents of the keys and values of a span, and what it gives of those of the queries."""
    tiling = Tiling.of(request, config.block_q, config.block_kv, config.chunk_q, span)
    cut = {**saved, **{name: saved[name][:, slice(*span)] for name in ("key", "value")}}
    placed = {**place_saved(tiling, cut), **lay.masks(tiling, operands)}
    B, K, G, q_blocks, kv_blocks = tiling.grid
    N, H, Hv = K * G, saved["query"].shape[3], saved["value"].shape[3]
    dtype = lay.working_dtype(request["query"].dtype)

    def of_keys(b: Scalar, h: Scalar, g: Scalar, i: Scalar, j: Scalar, *_: Any) -> tuple[Scalar, ...]:
        # Written with the last block of queries only; until then it stays at the first block, whose turn comes first.
        last = (g == G - 1) & (i == q_blocks - 1)
        return b, h, jnp.where(last, j, 0), 0

    outputs = {
        "query": ((B, N, H, tiling.T), dtype if alone else jnp.float32, lay.query_spec(tiling, H)),
        "key": ((B, K, tiling.S, H), dtype, pl.BlockSpec((None, None, tiling.kv, H), of_keys)),
        "value": ((B, K, tiling.S, Hv), dtype, pl.BlockSpec((None, None, tiling.kv, Hv), of_keys)),
    }
    scratch = {
        "query": pltpu.VMEM((H, tiling.q), jnp.float32),
        "key": pltpu.VMEM((kv_blocks * tiling.kv, H), jnp.float32),
        "value": pltpu.VMEM((kv_blocks * tiling.kv, Hv), jnp.float32),
    }
    results = lay.call(
        lambda prefetched, refs: _kernel(tiling, prefetched, refs),
        tiling,
        operands,
        placed,
        outputs={name: outputs[name] for name in wanted},
        scratch={f"acc_{name}": scratch[name] for name in wanted},
        grid=tiling.grid,
        semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"),
        vmem_limit_bytes=config.vmem_limit_bytes,
        name="attention_vjp",
    )
    order = {"query": (0, 3, 1, 2), "key": (0, 2, 1, 3), "value": (0, 2, 1, 3)}
    return {name: jnp.transpose(result, order[name]) for name, result in results.items()}


def _kernel(tiling: Tiling, prefetched: tuple[Any, ...], refs: dict[str, Any]) -> None:
    b, g, i, j = (pl.program_id(axis) for axis in (0, 2, 3, 4))
    bounds = tiling.bounds(b, prefetched)
    tile = Tile(tiling, refs, bounds, i, j)
    whole = tiling.whole(i, j, bounds, rows=True)
    runs = tiling.runs(i, j, bounds)
    of_keys = [name for name in ("key", "value") if f"acc_{name}" in refs]
    block = pl.ds(pl.multiple_of(j * tiling.kv, tiling.kv), tiling.kv)

    if "acc_query" in refs:

        @pl.when(j == 0)
        def _():
            refs["acc_query"][...] = jnp.zeros(refs["acc_query"].shape, jnp.float32)

    @pl.when((g == 0) & (i == 0))
    def _():
        for name in of_keys:
            acc = refs[f"acc_{name}"]
            acc[block, :] = jnp.zeros((tiling.kv, acc.shape[1]), jnp.float32)

    when(all_of([runs, whole]), lambda: _add_block(tile, block, masked=False))
    when(all_of([runs, opposite(whole)]), lambda: _add_block(tile, block, masked=True))

    scale = tiling.params.scale
    if "acc_query" in refs:

        @pl.when(j == tiling.grid[4] - 1)
        def _():
            refs["out_query"][...] = (refs["acc_query"][...] * scale).astype(refs["out_query"].dtype)

    @pl.when((g == tiling.G - 1) & (i == tiling.grid[3] - 1))
    def _():
        for name in of_keys:
            total = refs[f"acc_{name}"][block, :] * (scale if name == "key" else 1)
            refs[f"out_{name}"][...] = total.astype(refs[f"out_{name}"].dtype)


def _add_block(tile: Tile, block: Any, masked: bool) -> None:
    """Adds what a block of query rows and a block of keys give to each other's cotangents."""
    refs = tile.refs
    key = refs["key"][...]
    if masked:
        key = tile.without_tail_keys(key, 0)
    for chunk in range(tile.tiling.chunks):
        rows = tile.rows(chunk)
        query, d_out = (refs[name][:, rows] for name in ("query", "d_out"))
        weights, d_scores = weights_and_cotangents(tile, chunk, masked=masked, of_products=True)
        if masked:
            query, d_out = (tile.without_tail_rows(array, chunk) for array in (query, d_out))
        if "acc_value" in refs:
            refs["acc_value"][block, :] += lay.product(weights.astype(d_out.dtype), d_out, (1, 1))
        d_scores = d_scores.astype(query.dtype)
        if "acc_key" in refs:
            refs["acc_key"][block, :] += lay.product(d_scores, query, (1, 1))
        if "acc_query" in refs:
            refs["acc_query"][:, rows] += lay.product(key, d_scores, (0, 0))

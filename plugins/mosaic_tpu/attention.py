"""`attention` as a Mosaic TPU kernel: online softmax (Milakov and Gimelshein 2018) over blocks of keys (Dao et al. 2022).

Scores are made transposed, keys down and query rows across, so that a softmax runs down sublanes and what belongs to
a row is a vector of lanes, which broadcasts for free. Query rows go through in chunks; the products of one are made
while the exponentials of the one before are, in one stretch of code that the compiler schedules:

    key [kv, H] @ query^T [H, chunk] ──► scores ──► top ──► weights = 2^(scores - top)
                                                     │          │
    acc^T [Hv, chunk] = acc^T * 2^(old top - top) ◄──┘  +  value^T [Hv, kv] @ weights

A block that no row sees is neither computed nor copied. One that all rows see entirely has no masks. A row that has
seen nothing has a total of 0, and gets 0 and a log-sum-exp of -inf after the last block.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core.config import Config
from opmux.core.ops.attention import outputs as output_specs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu import attention_operands as lay
from opmux.plugins.mosaic_tpu.attention_config import AttentionConfig
from opmux.plugins.mosaic_tpu.attention_tile import Exponent, Tile
from opmux.plugins.mosaic_tpu.attention_tiling import Tiling, all_of, opposite, when

LOWEST = float(np.finfo(np.float32).min)
"""The top of a row that has seen nothing: what is hidden is lower, at -inf, and weighs 0 beside it."""


def attention(request: Request, operands: Operands, config: Config) -> Outputs:
    """`out` and `lse` of a canonical attention, in O(T + S) memory beside the bias and mask.

    Args:
      request: a request of `attention`.
      operands: its canonical operands.
      config: an `AttentionConfig`.
    """
    config = cast(AttentionConfig, config)
    specs = output_specs(request)
    if not (specs["lse"].size and request["key"].shape[1]):
        # Nothing sees anything, and Pallas has no grid over nothing.
        return {
            "out": jnp.zeros(specs["out"].shape, specs["out"].dtype),
            "lse": jnp.full(specs["lse"].shape, -jnp.inf, specs["lse"].dtype),
        }
    tiling = Tiling.of(request, config.block_q, config.block_kv, config.chunk_q)
    dtype = lay.working_dtype(request["query"].dtype)
    query, key, value = (lay.with_channels(operands[name].astype(dtype)) for name in ("query", "key", "value"))
    placed = {
        "query": lay.queries(tiling, query),
        "key": lay.keys(tiling, key),
        "value": lay.keys_along_lanes(tiling, value),
        **lay.masks(tiling, operands),
    }
    B, T, N, channels = tiling.B, tiling.T, tiling.K * tiling.G, value.shape[3]
    results = lay.call(
        lambda prefetched, refs: _kernel(tiling, prefetched, refs),
        tiling,
        operands,
        placed,
        outputs={
            "out": ((B, N, channels, T), dtype, lay.query_spec(tiling, channels)),
            "lse": ((B, N, 1, T), jnp.float32, lay.query_spec(tiling, 1)),
        },
        scratch={
            "top": pltpu.VMEM((1, tiling.q), jnp.float32),
            "total": pltpu.VMEM((1, tiling.q), jnp.float32),
            "acc": pltpu.VMEM((channels, tiling.q), jnp.float32),
        },
        grid=tiling.grid,
        semantics=("parallel", "parallel", "parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=config.vmem_limit_bytes,
        name="attention",
    )
    out = jnp.transpose(results["out"], (0, 3, 1, 2))[..., : tiling.Hv]
    return {"out": out.astype(specs["out"].dtype), "lse": jnp.transpose(results["lse"][:, :, 0], (0, 2, 1))}


def _kernel(tiling: Tiling, prefetched: tuple[Any, ...], refs: dict[str, Any]) -> None:
    b, _, _, i, j = (pl.program_id(axis) for axis in range(5))
    bounds = tiling.bounds(b, prefetched)
    tile = Tile(tiling, refs, bounds, i, j)
    runs = tiling.runs(i, j, bounds)
    whole = tiling.whole(i, j, bounds)

    @pl.when(j == 0)
    def _():
        refs["top"][...] = jnp.full(refs["top"].shape, LOWEST, jnp.float32)
        refs["total"][...] = jnp.zeros(refs["total"].shape, jnp.float32)
        refs["acc"][...] = jnp.zeros(refs["acc"].shape, jnp.float32)

    when(all_of([runs, whole]), lambda: _add_block(tile, masked=False))
    when(all_of([runs, opposite(whole)]), lambda: _add_block(tile, masked=True))

    @pl.when(j == tiling.grid[4] - 1)
    def _():
        _finish(tile)


def _add_block(tile: Tile, masked: bool) -> None:
    """Adds a block of keys to what the query rows of the block have seen."""
    exponent = Exponent(tile.tiling.params, "bias" in tile.refs)
    refs = tile.refs
    key = refs["key"][...]
    value, bad = _clean(tile, refs["value"][...]) if masked else (refs["value"][...], None)

    def scores(rows: slice) -> jax.Array:
        found, _ = exponent.scores(lay.product(key, refs["query"][:, rows], (1, 0)))
        if "bias" in refs:
            found = found + tile.bias(rows)
        return jnp.where(tile.seen(rows), found, -jnp.inf) if masked else found

    def weigh(rows: slice, scores: jax.Array) -> None:
        old = refs["top"][:, rows]
        top = jnp.maximum(old, jnp.max(scores, axis=0, keepdims=True))
        weights = exponent.power(scores - top)
        rescale = exponent.power(old - top)
        refs["top"][:, rows] = top
        refs["total"][:, rows] = refs["total"][:, rows] * rescale + jnp.sum(weights, axis=0, keepdims=True)
        more = lay.product(value, weights.astype(value.dtype), (1, 0))
        refs["acc"][:, rows] = refs["acc"][:, rows] * rescale + more

    chunks = tile.chunks()
    ahead = scores(chunks[0])
    for number, rows in enumerate(chunks):
        current = ahead
        if number + 1 < len(chunks):
            ahead = scores(chunks[number + 1])
        weigh(rows, current)
    if bad is not None:
        _poison(tile, bad)


def _clean(tile: Tile, value: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The values without what lies past the end; and, where keys may be hidden, without NaN, and where those were.

    A weight of 0 does not hide a value: 0 * NaN is NaN.
    """
    value = tile.without_tail_keys(value, 1)
    if not tile.tiling.hides:
        return value, None
    wide = value.astype(jnp.float32)
    bad = wide * 0 != 0
    return jnp.where(bad, 0, wide).astype(value.dtype), bad


def _poison(tile: Tile, bad: jax.Array) -> None:
    """Makes NaN what NaN and infinite values give, in the rows that see them."""
    where = jnp.where(bad, 1.0, 0.0)

    @pl.when(jnp.max(where) > 0)
    def _():
        dtype = tile.refs["value"].dtype
        for rows in tile.chunks():
            seen = jnp.where(tile.seen(rows), 1.0, 0.0).astype(dtype)
            hit = lay.product(where.astype(dtype), seen, (1, 0)) > 0
            tile.refs["acc"][:, rows] = jnp.where(hit, jnp.nan, tile.refs["acc"][:, rows])


def _finish(tile: Tile) -> None:
    """Stores the quotients and log-sum-exps."""
    refs = tile.refs
    unit = Exponent(tile.tiling.params, "bias" in refs).unit
    for rows in tile.chunks():
        total = refs["total"][:, rows]
        some = total != 0
        if tile.tiling.lengths:
            some = some & tile.valid_rows(rows, total.shape)
        total = jnp.where(some, total, 1)
        refs["out_lse"][:, rows] = jnp.where(some, refs["top"][:, rows] * (1 / unit) + jnp.log(total), -jnp.inf)
        out = jnp.where(some, refs["acc"][:, rows] * (1 / total), 0)
        refs["out_out"][:, rows] = out.astype(refs["out_out"].dtype)

"""`attention` as a Mosaic TPU kernel: online softmax over blocks of keys (Milakov and Gimelshein; Dao et al. 2022).

Scores are made transposed, keys down and query rows across, so that a softmax runs down sublanes and what belongs to
a row is a vector of lanes, which broadcasts for free. The values have a further channel of ones, whose sum is that of
the weights. Work is cut into items, a block of keys and a chunk of query rows each, which go through three stages:

    item w + 1   key [kv, H] @ query^T [H, chunk] ──► scores, in VMEM ──► top            matrix units
    item w       weights = 2^(scores - top), in VMEM                                     vector and exponential units
    item w - 1   acc^T [Hv + 1, chunk] = acc^T * 2^(old top - top) + value^T @ weights   matrix units

One turn of a loop does one stage of each of three items, so that no stage waits for the one before it and the units
work side by side. Buffers need no second slot: a part of the weights is read before the next ones take its place, and
so are scores. Keys and values of many blocks are in VMEM at once, and the loop runs over the blocks that some row
sees: first those that all rows see entirely, which have no masks, then the others. A row that has seen nothing has a
total of 0, and gets 0 and a log-sum-exp of -inf.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core.config import Config
from opmux.core.indices import Scalar
from opmux.core.ops.attention import outputs as output_specs
from opmux.core.ops.attention import without_scores
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu import attention_operands as lay
from opmux.plugins.mosaic_tpu.attention_config import AttentionConfig
from opmux.plugins.mosaic_tpu.attention_stages import LOWEST, Stages
from opmux.plugins.mosaic_tpu.attention_tile import Exponent, Tile
from opmux.plugins.mosaic_tpu.attention_tiling import Tiling, when
from opmux.plugins.mosaic_tpu.dense_config import PACKED_ROWS, SUBLANES, round_up


def attention(request: Request, operands: Operands, config: Config) -> Outputs:
    """`out` and `lse` of a canonical attention, in O(T + S) memory beside the bias and mask.

    Args:
      request: a request of `attention`.
      operands: its canonical operands.
      config: an `AttentionConfig`.
    """
    config = cast(AttentionConfig, config)
    trivial = without_scores(request)
    if trivial is not None:
        return trivial
    specs = output_specs(request)
    tiling = Tiling.of(request, config.block_q, config.block_kv, config.chunk_q)
    # A block of a bias or mask for each block of keys that is in VMEM would be too much.
    held = 1 if tiling.selective else min(max(config.span_kv // tiling.kv, 1), tiling.grid[4])
    spans = dataclasses.replace(tiling, kv=held * tiling.kv)
    dtype = lay.working_dtype(request["query"].dtype)
    query, key = (lay.with_channels(operands[name].astype(dtype)) for name in ("query", "key"))
    value = _with_ones(operands["value"].astype(dtype))
    placed = {
        "query": lay.queries(tiling, query),
        "key": lay.keys(spans, key),
        "value": lay.keys_along_lanes(spans, value),
        **lay.masks(tiling, operands),
    }
    B, T, N, channels = tiling.B, tiling.T, tiling.K * tiling.G, max(tiling.Hv, 1)
    results = lay.call(
        lambda prefetched, refs: _kernel(tiling, held, config.part_kv, prefetched, refs),
        tiling,
        operands,
        placed,
        outputs={
            "out": ((B, N, channels, T), dtype, lay.query_spec(tiling, channels)),
            "lse": ((B, N, 1, T), jnp.float32, lay.query_spec(tiling, 1)),
        },
        scratch={
            "top": pltpu.VMEM((1, tiling.q), jnp.float32),
            "acc": pltpu.VMEM((value.shape[3], tiling.q), jnp.float32),
            "scores": pltpu.VMEM((tiling.kv, tiling.chunk), jnp.float32),
            "tops": pltpu.VMEM((SUBLANES, tiling.chunk), jnp.float32),
            "weights": pltpu.VMEM((tiling.kv, tiling.chunk), dtype),
            "rescale": pltpu.VMEM((1, tiling.chunk), jnp.float32),
            **({"sums": pltpu.VMEM((SUBLANES, tiling.q), jnp.float32)} if _sums_apart(request) else {}),
        },
        grid=spans.grid,
        semantics=("parallel", "parallel", "parallel", "parallel", "arbitrary"),
        vmem_limit_bytes=config.vmem_limit_bytes,
        name="attention",
    )
    out = jnp.transpose(results["out"], (0, 3, 1, 2))[..., : tiling.Hv]
    return {"out": out.astype(specs["out"].dtype), "lse": jnp.transpose(results["lse"][:, :, 0], (0, 2, 1))}


def _sums_apart(request: Request) -> bool:
    """Whether the weights are summed apart for the log-sum-exp: those that meet the ones are rounded to 16 bits.

    The output is divided by the sum of what it was made of, which is the rounded weights.
    """
    return "lse" in request.wanted and lay.working_dtype(request["query"].dtype) == jnp.bfloat16


def _with_ones(value: jax.Array) -> jax.Array:
    """The values, [B, S, K, Hv], with a channel of ones after their own, at `Hv`, and zeros that fill a tile."""
    Hv = value.shape[3]
    ones = jnp.ones((*value.shape[:3], 1), value.dtype)
    fill = jnp.zeros((*value.shape[:3], round_up(Hv + 1, PACKED_ROWS // 2) - Hv - 1), value.dtype)
    return jnp.concatenate([value, ones, fill], axis=3)


def _kernel(tiling: Tiling, held: int, part_kv: int, prefetched: tuple[Any, ...], refs: dict[str, Any]) -> None:
    b, i, step = (pl.program_id(axis) for axis in (0, 3, 4))
    steps = -(-tiling.grid[4] // held)
    first_block: Scalar = step * held if steps > 1 else 0
    bounds = tiling.bounds(b, prefetched)

    @pl.when(step == 0)
    def _():
        refs["top"][...] = jnp.full(refs["top"].shape, LOWEST, jnp.float32)
        for name in ("acc", "sums"):
            if name in refs:
                refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

    first, low, high, last = tiling.ranges(i, bounds, first_block, held)

    def whole(number: Scalar) -> Tile:
        return Tile(tiling, refs, bounds, i, low + number, low + number - first_block)

    def partial(number: Scalar) -> Tile:
        # Those before the whole ones, then those after them.
        before = low - first
        j = (
            first + number
            if isinstance(before, int) and not before and isinstance(high, int) and high == low
            else (
                high + number
                if isinstance(before, int) and not before
                else jnp.where(number < before, first + number, high + number - before)
            )
        )
        return Tile(tiling, refs, bounds, i, j, j - first_block)

    Stages(tiling, refs, whole, part_kv, masked=False).run(high - low)
    masked = Stages(tiling, refs, partial, part_kv, masked=True)
    if tiling.hides or tiling.ragged_keys:
        masked.run(low - first + last - high)
    if tiling.hides:
        masked.poison(low - first + last - high)
    when(True if steps == 1 else step == steps - 1, lambda: _finish(Tile(tiling, refs, bounds, i, 0)))


def _finish(tile: Tile) -> None:
    """Stores the quotients and log-sum-exps."""
    refs, tiling = tile.refs, tile.tiling
    unit = Exponent(tiling.params, "bias" in refs).unit
    channels = refs["out_out"].shape[0]
    for chunk in range(tiling.chunks):
        rows = tile.rows(chunk)
        total = refs["acc"][tiling.Hv : tiling.Hv + 1, rows]
        some = total != 0
        if tiling.lengths:
            some = some & tile.valid_rows(chunk, total.shape)
        total = jnp.where(some, total, 1)
        exact = jnp.sum(refs["sums"][:, rows], axis=0, keepdims=True) if "sums" in refs else total
        lse = refs["top"][:, rows] * (1 / unit) + jnp.log(jnp.where(some, exact, 1))
        refs["out_lse"][:, rows] = jnp.where(some, lse, -jnp.inf)
        out = jnp.where(some, refs["acc"][:channels, rows] * (1 / total), 0)
        refs["out_out"][:, rows] = out.astype(refs["out_out"].dtype)

"""Cotangents of keys and values, on a Hopper GPU; the transposed scores of `attention_dq`, keys by queries.

Each of two warpgroups owns 64 keys of a tile, past which the queries of all heads that read them stream, so that
cotangents of grouped heads are summed in registers, always in the same order:

    k, v ── TMA ──► k_s, v_s [warpgroup] ─┐ wgmma
    q, d_out ── TMA ──► q_s, d_s [stage] ─┴──► weights, d_weights ──► d_scores ─┐ wgmma
         full ▲ │ empty                        lse, delta [stage]               ├──► dk, dv ──► k_s, v_s ── TMA
                └─ q_s, d_s ────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.attention_blocks import fold, rows_of
from opmux.plugins.mosaic_gpu.attention_config import ROWS, TILE, AttentionVjpConfig
from opmux.plugins.mosaic_gpu.attention_scores import Scores
from opmux.plugins.mosaic_gpu.attention_stream import Stream, finish, over_tiles
from opmux.plugins.mosaic_gpu.attention_tiles import KeyTiles, stream, streamed
from opmux.plugins.mosaic_gpu.attention_view import View
from opmux.plugins.mosaic_gpu.capability import check_smem
from opmux.plugins.mosaic_gpu.dot import dot
from opmux.plugins.mosaic_gpu.pallas import COMPUTE_WARPGROUPS, barriers, launch, swizzled


def dkv(
    tiles: KeyTiles, config: AttentionVjpConfig, wanted: Sequence[str], query: jax.Array, key: jax.Array,
    value: jax.Array, d_out: jax.Array, rows: jax.Array, masks: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:  # fmt: skip
    """Cotangents of keys and values.

    Args:
      tiles: the problem in tiles.
      config: blocks.
      wanted: `key`, `value` or both.
      query: [B, T, N, H]; key: [B, S, K, H]; value: [B, S, K, Hv]; d_out: [B, T, N, Hv]; all finite where hidden.
      rows: [B, N, 2, T], T padded to blocks: log-sum-exps in base 2, and deltas.
      masks: as `attention_view.masks` makes them for transposed scores.

    Returns:
      What is wanted: [B, S, K, H] and [B, S, K, Hv].
    """
    problem, block, stages = tiles.problem, config.block_q, config.num_stages
    H, Hv, dtype = problem.H, problem.Hv, problem.dtype
    line = block * dtype.itemsize
    needed = dtype.itemsize * (H + Hv) * (TILE + stages * block) + stages * block * 8
    check_smem(needed, block_q=block, num_stages=stages, head=H, value_head=Hv)
    given = {"key": key, "value": value}
    outs = launch(
        functools.partial(_kernel, tiles=tiles, block=block, stages=stages, names=tuple(masks), wanted=tuple(wanted)),
        [streamed(given[name].shape, dtype, TILE) for name in wanted],
        name="attention_d" + "".join(name[0] for name in wanted),
        grid=tiles.ctas,
        warpgroups=COMPUTE_WARPGROUPS,
        approx_math=True,
        scratch=(
            *(swizzled((COMPUTE_WARPGROUPS, ROWS, size), dtype, line) for size in (H, Hv)),
            *(swizzled((stages, block, size), dtype, line) for size in (H, Hv)),
            plgpu.SMEM((stages, 2, block), jnp.float32),
            barriers(COMPUTE_WARPGROUPS, 2),
            barriers(stages, 3),
            barriers(stages, COMPUTE_WARPGROUPS),
        ),
    )(stream(query, block), stream(key, TILE), stream(value, TILE), stream(d_out, block), rows, *masks.values())
    return {
        name: out[:, : problem.S, :, : given[name].shape[-1]] for name, out in zip(wanted, outs, strict=True)
    }  # fmt: skip


def _kernel(
    q_g: Any, k_g: Any, v_g: Any, d_g: Any, rows_g: Any, *refs: Any, tiles: KeyTiles, block: int, stages: int,
    names: tuple[str, ...], wanted: tuple[str, ...],
) -> None:  # fmt: skip
    problem = tiles.problem
    masks, refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    outs, (k_s, v_s, q_s, d_s, rows_s, own, full, empty) = refs[: len(wanted)], refs[len(wanted) :]
    wg, scores, shape = lax.axis_index("wg"), Scores(problem), (ROWS, block)

    def tile(number: Any, done: Any) -> Any:
        b, head, row = tiles.place(number)
        bounds = View(problem, masks, b, head, 1).bounds
        span = problem.queries_of(row, TILE, bounds, block)
        row = row + wg * ROWS

        def copy(step: Any, slot: Any) -> None:
            group, step = (lax.div(step, span.steps), lax.rem(step, span.steps)) if problem.G > 1 else (0, step)
            queries, q_head = pl.ds(span.block(step) * block, block), head * problem.G + group
            plgpu.copy_gmem_to_smem(q_g.at[b, queries, q_head], q_s.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(d_g.at[b, queries, q_head], d_s.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(rows_g.at[b, q_head, :, queries], rows_s.at[slot], full.at[slot])

        steps = span.steps * problem.G
        blocks = Stream(copy, steps, done, stages, full, empty)
        blocks.start()
        if tiles.persistent:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's results have left k_s and v_s
        at = (b, pl.ds(row, ROWS), head)
        plgpu.copy_gmem_to_smem(k_g.at[at], k_s.at[wg], own.at[wg])
        plgpu.copy_gmem_to_smem(v_g.at[at], v_s.at[wg], own.at[wg])
        plgpu.barrier_wait(own.at[wg])

        def step(
            view: View, before: Any, masked: bool, number: Any, sums: dict[str, jax.Array]
        ) -> dict[str, jax.Array]:
            slot, column = blocks.take(before + number), span.block(number) * block
            bias = view.bias(column, row, shape)
            values, slope = scores.of(dot(k_s.at[wg], q_s.at[slot], transpose_b=True), bias)
            weights = scores.weights(values, rows_of(rows_s[slot, 0], shape, 1))
            if masked:
                weights = jnp.where(view.seen(column, row, shape, bias), weights, 0.0)
            new = {}
            if "value" in wanted:
                new["value"] = dot(weights.astype(problem.dtype), d_s.at[slot], sums["value"])
            if "key" in wanted:
                d_weights = dot(v_s.at[wg], d_s.at[slot], transpose_b=True)
                d_scores = weights * (d_weights - rows_of(rows_s[slot, 1], shape, 1))
                if masked:  # a row of NaN has no part in keys that it does not see
                    d_scores = jnp.where(weights == 0, 0.0, d_scores)
                d_scores = d_scores if slope is None else d_scores * slope
                new["key"] = dot(d_scores.astype(problem.dtype), q_s.at[slot], sums["key"])
            plgpu.commit_smem()  # rows_s has been read, and must not be overwritten before
            blocks.release(slot)
            return new

        def group(number: Any, sums: dict[str, jax.Array]) -> dict[str, jax.Array]:
            view = View(problem, masks, b, head * problem.G + number, 1)
            return fold(span, functools.partial(step, view, number * span.steps), sums)

        sizes = {"key": problem.H, "value": problem.Hv}
        sums = {name: jnp.zeros((ROWS, sizes[name]), jnp.float32) for name in sorted(wanted)}
        sums = group(0, sums) if problem.G == 1 else lax.fori_loop(0, problem.G, group, sums)

        for name, out_g in zip(wanted, outs, strict=True):
            total = sums[name] * problem.params.scale if name == "key" else sums[name]
            if problem.lengths:
                keys = row + lax.broadcasted_iota(jnp.int32, total.shape, 0)
                total = jnp.where(keys < bounds.kv, total, 0.0)
            staged = k_s if name == "key" else v_s
            staged[wg] = total.astype(problem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged.at[wg], out_g.at[at])
        return steps

    finish(empty, over_tiles(tiles.count, tiles.ctas, tile), stages)

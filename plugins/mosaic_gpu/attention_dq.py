"""Cotangents of queries, on a Hopper GPU: weights are made again block by block (Dao et al. 2022, algorithm 4).

Each of two warpgroups owns 64 queries of a tile, past which keys and values stream:

    q, d_out ── TMA ──► q_s, d_s [warpgroup] ─┐ wgmma
    k, v ── TMA ──► k_s, v_s [stage] ─────────┴──► weights, d_weights ──► d_scores ─┐ wgmma
         full ▲ │ empty                            lse, delta                       ├──► acc ──► q_s ── TMA ──► dq
                └─ k_s ─────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
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
from opmux.plugins.mosaic_gpu.attention_tiles import QueryTiles, stream, streamed
from opmux.plugins.mosaic_gpu.attention_view import View
from opmux.plugins.mosaic_gpu.capability import check_smem
from opmux.plugins.mosaic_gpu.dot import dot
from opmux.plugins.mosaic_gpu.pallas import COMPUTE_WARPGROUPS, barriers, launch, load_tile, swizzled


def dq(
    tiles: QueryTiles, config: AttentionVjpConfig, query: jax.Array, key: jax.Array, value: jax.Array,
    d_out: jax.Array, rows: jax.Array, masks: Mapping[str, jax.Array],
) -> jax.Array:  # fmt: skip
    """The cotangent of the queries.

    Args:
      tiles: the problem in tiles.
      config: blocks.
      query: [B, T, N, H]; key: [B, S, K, H]; value: [B, S, K, Hv]; d_out: [B, T, N, Hv]; all finite where hidden.
      rows: [B, N, 2, T], T padded to tiles: log-sum-exps in base 2, and deltas.
      masks: as `attention_view.masks` makes them.

    Returns:
      [B, T, N, H].
    """
    problem, block, stages = tiles.problem, config.block_kv, config.num_stages
    H, Hv, dtype = problem.H, problem.Hv, problem.dtype
    line = block * dtype.itemsize
    check_smem(
        dtype.itemsize * (H + Hv) * (TILE + stages * block), block_kv=block, num_stages=stages, head=H, value_head=Hv
    )
    out = launch(
        functools.partial(_kernel, tiles=tiles, block=block, stages=stages, names=tuple(masks)),
        streamed(query.shape, dtype, TILE),
        name="attention_dq",
        grid=tiles.ctas,
        warpgroups=COMPUTE_WARPGROUPS,
        approx_math=True,
        scratch=(
            *(swizzled((COMPUTE_WARPGROUPS, ROWS, size), dtype, line) for size in (H, Hv)),
            *(swizzled((stages, block, size), dtype, line) for size in (H, Hv)),
            barriers(COMPUTE_WARPGROUPS, 2),
            barriers(stages, 2),
            barriers(stages, COMPUTE_WARPGROUPS),
        ),
    )(stream(query, TILE), stream(key, block), stream(value, block), stream(d_out, TILE), rows, *masks.values())
    return out[:, : problem.T, :, : query.shape[-1]]


def _kernel(
    q_g: Any, k_g: Any, v_g: Any, d_g: Any, rows_g: Any, *refs: Any, tiles: QueryTiles, block: int, stages: int,
    names: tuple[str, ...],
) -> None:  # fmt: skip
    problem = tiles.problem
    masks, refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    o_g, q_s, d_s, k_s, v_s, own, full, empty = refs
    wg, scores, shape = lax.axis_index("wg"), Scores(problem), (ROWS, block)
    # The scale goes into the weights, by way of their exponent, where it costs no digits of d_scores.
    scale = problem.params.scale
    folded = scale > 0 and problem.dtype == jnp.bfloat16

    def tile(number: Any, done: Any) -> Any:
        b, head, row = tiles.place(number)
        view = View(problem, masks, b, head)
        span = problem.keys_of(row, TILE, view.bounds, block)
        kv_head, row = lax.div(head, problem.G), row + wg * ROWS

        def copy(step: Any, slot: Any) -> None:
            at = (b, pl.ds(span.block(step) * block, block), kv_head)
            plgpu.copy_gmem_to_smem(k_g.at[at], k_s.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(v_g.at[at], v_s.at[slot], full.at[slot])

        blocks = Stream(copy, span.steps, done, stages, full, empty)
        blocks.start()
        if tiles.persistent:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's result has left q_s
        at = (b, pl.ds(row, ROWS), head)
        plgpu.copy_gmem_to_smem(q_g.at[at], q_s.at[wg], own.at[wg])
        plgpu.copy_gmem_to_smem(d_g.at[at], d_s.at[wg], own.at[wg])
        lse, delta = (load_tile(rows_g, (b, head, which, pl.ds(row, ROWS))) for which in range(2))
        lse = lse - math.log(scale) * scores.unit if folded else lse
        plgpu.barrier_wait(own.at[wg])

        def step(masked: bool, number: Any, acc: jax.Array) -> jax.Array:
            slot = blocks.take(number)
            column = span.block(number) * block
            bias = view.bias(row, column, shape)
            values, slope = scores.of(dot(q_s.at[wg], k_s.at[slot], transpose_b=True), bias)
            weights = scores.weights(values, rows_of(lse, shape))
            weights = weights if slope is None else weights * slope
            d_weights = dot(d_s.at[wg], v_s.at[slot], transpose_b=True)
            d_scores = weights * (d_weights - rows_of(delta, shape))
            if masked:
                d_scores = jnp.where(view.seen(row, column, shape, bias), d_scores, 0.0)
            acc = dot(d_scores.astype(problem.dtype), k_s.at[slot], acc)
            blocks.release(slot)
            return acc

        acc = fold(span, step, jnp.zeros((ROWS, problem.H), jnp.float32))
        q_s[wg] = (acc if folded else acc * scale).astype(problem.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_s.at[wg], o_g.at[at])
        return span.steps

    finish(empty, over_tiles(tiles.count, tiles.ctas, tile), stages)

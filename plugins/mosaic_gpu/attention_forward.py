"""The forward attention kernel of a Hopper GPU: online softmax in base 2, two compute warpgroups taking turns.

A memory warpgroup streams blocks of keys and values past a tile of queries, of which each compute warpgroup owns half.
While one of them multiplies, the other one makes weights of its scores; weights stay in registers:

    q ── TMA ──► q_s [warpgroup] ─┐ wgmma
    k ── TMA ──► k_s [stage] ─────┴──► scores ──► weights ─┐ wgmma
         k_full ▲ │ k_empty            top, total          ├──► acc ──► q_s or o_s ── TMA ──► out
    v ── TMA ──► v_s [stage] ──────────────────────────────┘
         v_full ▲ │ v_empty

    turn        0: scores ║ softmax    ║ weigh, scores ║ softmax     …
                1:        ║ scores     ║ softmax       ║ weigh, …

The schedule is that of FlashAttention-3 (Shah et al. 2024) and of JAX's own kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.attention_blocks import Problem, fold, rows_of
from opmux.plugins.mosaic_gpu.attention_config import ROWS, TILE, WIDE, AttentionConfig
from opmux.plugins.mosaic_gpu.attention_scores import LOWEST, Scores
from opmux.plugins.mosaic_gpu.attention_stream import over_tiles, slot_of
from opmux.plugins.mosaic_gpu.attention_tiles import QueryTiles, divide, stream, streamed
from opmux.plugins.mosaic_gpu.attention_view import View
from opmux.plugins.mosaic_gpu.capability import check_smem
from opmux.plugins.mosaic_gpu.dot import dot
from opmux.plugins.mosaic_gpu.pallas import (
    COMPUTE_WARPGROUPS,
    MEMORY_WARPGROUP,
    barriers,
    drain,
    for_each,
    launch,
    swizzled,
)


def forward(
    problem: Problem, config: AttentionConfig, query: jax.Array, key: jax.Array, value: jax.Array,
    masks: Mapping[str, jax.Array], *, with_lse: bool,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """Attention to values none of which is NaN or infinite where a query must not see it.

    Args:
      problem: sizes.
      config: blocks.
      query: [B, T, N, H]; key: [B, S, K, H]; value: [B, S, K, Hv].
      masks: as `attention_view.masks` makes them.
      with_lse: whether the log-sum-exp is wanted.

    Returns:
      Output [B, T, N, Hv] and log-sum-exp [B, N, T], float32.
    """
    block, stages, parts = config.block_kv, config.num_stages, 2 if problem.Hv > WIDE else 1
    tiles, H, Hv = QueryTiles.of(problem, config.num_ctas, parts), problem.H, problem.Hv // parts
    itemsize = problem.dtype.itemsize
    needed = itemsize * (TILE * (H if Hv == H else H + Hv) + stages * block * (H + Hv))
    check_smem(needed, block_kv=block, num_stages=stages, head=H, value_head=Hv)

    outs = [streamed((problem.B, problem.T, problem.N, value.shape[-1]), problem.dtype, TILE)]
    if with_lse:
        outs.append(jax.ShapeDtypeStruct((problem.B, problem.N, tiles.per_head * TILE), jnp.float32))
    given = [stream(query, TILE), stream(key, block), stream(value, block)]
    found = launch(
        functools.partial(_kernel, tiles=tiles, block=block, stages=stages, names=tuple(masks), with_lse=with_lse),
        outs,
        name="attention",
        grid=tiles.ctas,
        specialized=True,
        approx_math=True,
        scratch=(
            swizzled((COMPUTE_WARPGROUPS, ROWS, H), problem.dtype),
            *((swizzled((COMPUTE_WARPGROUPS, ROWS, Hv), problem.dtype),) if Hv != H else ()),
            swizzled((stages, block, H), problem.dtype),
            swizzled((stages, block, Hv), problem.dtype, block * itemsize),
            barriers(COMPUTE_WARPGROUPS, 1),
            *(barriers(stages, arrivals) for arrivals in (1, 1, COMPUTE_WARPGROUPS, COMPUTE_WARPGROUPS)),
            barriers(1, COMPUTE_WARPGROUPS),
        ),
    )(*given, *masks.values())
    out = found[0][:, : problem.T, :, : value.shape[-1]]
    return out, found[1][:, :, : problem.T] if with_lse else None


def _kernel(
    q_g: Any, k_g: Any, v_g: Any, *refs: Any, tiles: QueryTiles, block: int, stages: int, names: tuple[str, ...],
    with_lse: bool,
) -> None:  # fmt: skip
    problem = tiles.problem
    parts, channels = tiles.parts, problem.Hv // tiles.parts
    masks, scratch = dict(zip(names, refs, strict=False)), list(refs[len(names) :])
    o_g = scratch.pop(0)
    lse_g: Any = scratch.pop(0) if with_lse else None
    q_s = scratch.pop(0)
    o_s = scratch.pop(0) if channels != problem.H else q_s
    k_s, v_s, q_full, k_full, v_full, k_empty, v_empty, turn = scratch
    wg = lax.axis_index("wg")

    def columns(part: Any) -> tuple[Any, ...]:
        """Channels of a part of the values, where there are several."""
        return (pl.ds(part * channels, channels),) if parts > 1 else ()

    @pl.when(wg == MEMORY_WARPGROUP)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def load(tile: Any, done: Any) -> Any:
            tile, part = divide(tile, parts)
            b, head, row = tiles.place(tile)
            span = problem.keys_of(row, TILE, View(problem, masks, b, head).bounds, block)
            head = lax.div(head, problem.G)

            def load_block(step: Any) -> None:
                slot = slot_of(done + step, stages)
                at = (b, pl.ds(span.block(step) * block, block), head)
                for window, target, full, empty in (
                    (k_g.at[at], k_s, k_full, k_empty), (v_g.at[(*at, *columns(part))], v_s, v_full, v_empty)
                ):  # fmt: skip
                    pl.when(done + step >= stages)(lambda empty=empty: plgpu.barrier_wait(empty.at[slot]))
                    plgpu.copy_gmem_to_smem(window, target.at[slot], full.at[slot])

            for_each(0, span.steps, load_block)
            return span.steps

        total = over_tiles(tiles.count, tiles.ctas, load)
        drain(k_empty, total, stages)
        drain(v_empty, total, stages)

    @pl.when(wg < COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        scores = Scores(problem)
        shape = (ROWS, block)

        def take_turn() -> None:
            plgpu.barrier_arrive(turn.at[0])
            plgpu.barrier_wait(turn.at[0])

        def attend(tile: Any, done: Any) -> Any:
            tile, part = divide(tile, parts)
            b, head, row = tiles.place(tile)
            view = View(problem, masks, b, head)
            bounds = view.bounds
            span = problem.keys_of(row, TILE, bounds, block)
            row = row + wg * ROWS
            if tiles.persistent:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's output has left q_s
            plgpu.copy_gmem_to_smem(q_g.at[b, pl.ds(row, ROWS), head], q_s.at[wg], q_full.at[wg])
            plgpu.barrier_wait(q_full.at[wg])

            def wait_for_keys(step: Any) -> None:
                @pl.when(step < span.steps)
                def _() -> None:
                    plgpu.barrier_wait(k_full.at[slot_of(done + step, stages)])

            def step(masked: bool, number: Any, carry: Any) -> Any:
                acc, top, total = carry
                slot = slot_of(done + number, stages)
                raw = dot(q_s.at[wg], k_s.at[slot], transpose_b=True, after=take_turn)
                plgpu.barrier_arrive(k_empty.at[slot])
                column = span.block(number) * block
                bias = view.bias(row, column, shape)
                x, _ = scores.of(raw, bias)
                if masked:
                    x = jnp.where(view.seen(row, column, shape, bias), x, -jnp.inf)
                new = jnp.maximum(top, x.max(axis=1) * scores.factor)
                shrink = scores.power(top - new)
                weights = scores.weights(x, rows_of(new, shape))
                acc = acc * rows_of(shrink, acc.shape)
                total = total * shrink + weights.sum(axis=1)
                acc, new, total, packed = lax.optimization_barrier((acc, new, total, weights.astype(problem.dtype)))
                plgpu.barrier_arrive(turn.at[0])  # the softmax is done
                plgpu.barrier_wait(v_full.at[slot])
                plgpu.barrier_wait(turn.at[0])  # the other one's product is under way
                acc = dot(packed, v_s.at[slot], acc, after=lambda: wait_for_keys(number + 1))
                plgpu.barrier_arrive(v_empty.at[slot])
                return acc, new, total

            wait_for_keys(0)
            acc, top, total = fold(
                span, step,
                (
                    jnp.zeros((ROWS, channels), jnp.float32), jnp.full((ROWS,), LOWEST, jnp.float32),
                    jnp.zeros((ROWS,), jnp.float32),
                ),
            )  # fmt: skip

            out = acc * rows_of(jnp.where(total == 0, 0.0, 1 / total), acc.shape)
            if problem.lengths:
                out = jnp.where(row + lax.broadcasted_iota(jnp.int32, out.shape, 0) < bounds.q, out, 0.0)
            o_s[wg] = out.astype(problem.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(o_s.at[wg], o_g.at[(b, pl.ds(row, ROWS), head, *columns(part))])
            if lse_g is not None:
                # Made only if it is stored: nothing else says how it lies in registers.
                lse = top * (1 / scores.unit) + jnp.log(total)
                if problem.lengths:
                    lse = jnp.where(row + lax.broadcasted_iota(jnp.int32, lse.shape, 0) < bounds.q, lse, -jnp.inf)

                @pl.when(part == 0)
                def _() -> None:
                    lse_g[b, head, pl.ds(row, ROWS)] = lse

            return span.steps

        pl.when(wg == 1)(take_turn)  # which starts half a step behind
        over_tiles(tiles.count, tiles.ctas, attend)
        pl.when(wg == 0)(take_turn)
        plgpu.wait_smem_to_gmem(0)

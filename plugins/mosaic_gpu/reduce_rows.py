"""Reduces the rows of a large [A, R]: a tile of 256 rows and 128 bytes a row at a time.

Each of two compute warpgroups owns 128 rows and keeps a total for every column of the tile, which are reduced across
the four lanes that share a row when the row has ended. The tile is swizzled, so that eight rows at a time are read
without bank conflicts.

    x [A, R] ── TMA ──► x_s [stage, 256, line] ──► totals [128, line] in registers ──► o_s ── TMA ──► out [A]
               full[stage]     ▲                  │ after each tile
                               └── empty[stage] ──┘
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.pallas import (
    COMPUTE_WARPGROUPS,
    MEMORY_WARPGROUP,
    barriers,
    count,
    drain,
    for_each,
    launch,
    pad_for_simulator,
)
from opmux.plugins.mosaic_gpu.reduce_config import LINE_BYTES, TILE_ROWS, ReduceConfig
from opmux.plugins.mosaic_gpu.reduction import Reduction

_OWN = TILE_ROWS // COMPUTE_WARPGROUPS


def reduce_rows(x: jax.Array, reduction: Reduction, config: ReduceConfig) -> jax.Array:
    """Reduces [A, R] to [A]; A is a multiple of 8, and R of as many elements as 128 bytes have.

    Args:
      x: the operand.
      reduction: what to do; no product.
      config: stages and blocks.
    """
    A, R = x.shape
    line = LINE_BYTES // x.dtype.itemsize
    x = pad_for_simulator(x, (TILE_ROWS, line))
    tiles, steps = -(-A // TILE_ROWS), R // line
    ctas = min(config.num_ctas, tiles)
    out = launch(
        functools.partial(
            _kernel, reduction=reduction, line=line, steps=steps, tiles=tiles, ctas=ctas, stages=config.num_stages
        ),
        jax.ShapeDtypeStruct(x.shape[:1], reduction.out),
        name=f"reduce_rows_{reduction.kind}",
        grid=ctas,
        specialized=True,
        scratch=(
            plgpu.SMEM(
                (config.num_stages, TILE_ROWS, line), x.dtype,
                transforms=(plgpu.TilingTransform((8, line)), plgpu.SwizzleTransform(LINE_BYTES)),
            ),
            plgpu.SMEM((COMPUTE_WARPGROUPS, _OWN), reduction.out),
            barriers(config.num_stages, 1),
            barriers(config.num_stages, COMPUTE_WARPGROUPS),
        ),
    )(x)  # fmt: skip
    return out[:A]


def _kernel(
    x_g: Any, o_g: Any, x_s: Any, o_s: Any, full: Any, empty: Any, *, reduction: Reduction, line: int, steps: int,
    tiles: int, ctas: int, stages: int,
) -> None:  # fmt: skip
    warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
    num_tiles = count(cta, tiles, ctas)

    @pl.when(warpgroup == MEMORY_WARPGROUP)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def load(copy: Any) -> None:
            stage = lax.rem(copy, stages)
            row = (cta + lax.div(copy, steps) * ctas) * TILE_ROWS

            @pl.when(copy >= stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[stage])

            window = x_g.at[pl.ds(row, TILE_ROWS), pl.ds(lax.rem(copy, steps) * line, line)]
            plgpu.copy_gmem_to_smem(window, x_s.at[stage], full.at[stage])

        for_each(0, num_tiles * steps, load)
        drain(empty, num_tiles * steps, stages)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        own = warpgroup * _OWN

        def tile(number: Any) -> None:
            def step(index: Any, totals: jax.Array) -> jax.Array:
                stage = lax.rem(number * steps + index, stages)
                plgpu.barrier_wait(full.at[stage])
                totals = reduction.join(totals, reduction.load(x_s[stage, pl.ds(own, _OWN)]))
                plgpu.commit_smem()  # what was read must not be overwritten by the next copy before it was read
                plgpu.barrier_arrive(empty.at[stage])
                return totals

            totals = lax.fori_loop(0, steps, step, reduction.start((_OWN, line)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_s[warpgroup] = reduction.finish(reduction.across(totals))
            plgpu.commit_smem()
            row = (cta + number * ctas) * TILE_ROWS + own
            plgpu.copy_smem_to_gmem(o_s.at[warpgroup], o_g.at[pl.ds(row, _OWN)])

        for_each(0, num_tiles, tile)
        plgpu.wait_smem_to_gmem(0)

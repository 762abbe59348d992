"""Reduces the middle axis of a large [A, R, B]: each lane keeps the totals of its own columns.

Two compute warpgroups own `tile_n` neighbouring columns each, and a memory warpgroup brings them tiles of `tile_r`
rows. No lane needs what another has. The reduced axis is cut into parts, so that there is work for every block.

    x [A, R, B] ── TMA ──► x_s [stage, warpgroup, tile_r, tile_n] ──► totals in registers
                   full[stage]     ▲                               │         │ after each part
                                   └──────────── empty[stage] ─────┘         ▼
                                              out [A, parts, B] ◄── TMA ── o_s [warpgroup, tile_n]
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
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
from opmux.plugins.mosaic_gpu.reduce_config import ReduceConfig
from opmux.plugins.mosaic_gpu.reduction import Reduction


def reduce_columns(x: jax.Array, reduction: Reduction, config: ReduceConfig, parts: int) -> jax.Array:
    """Reduces [A, R, B] to [A, parts, B]; rows of B elements must begin at multiples of 16 bytes.

    Args:
      x: the operand.
      reduction: what to do.
      config: tiles, stages and blocks.
      parts: in how many parts the reduced axis is cut; the last ones may be shorter, or empty.
    """
    A, R, B = x.shape
    tile_r, tile_n = config.tile_r * (4 // x.dtype.itemsize), config.tile_n
    width = COMPUTE_WARPGROUPS * tile_n
    steps = -(-R // (tile_r * parts))
    x = pad_for_simulator(x, (1, steps * tile_r * parts, width))
    tiles = A * parts * -(-B // width)
    ctas = min(config.num_ctas, tiles)
    out = launch(
        functools.partial(
            _kernel, reduction=reduction, length=R, width=B, parts=parts, steps=steps, tile_r=tile_r, tile_n=tile_n,
            tiles=tiles, ctas=ctas, stages=config.num_stages,
        ),
        jax.ShapeDtypeStruct((A * parts, x.shape[2]), reduction.out),
        name=f"reduce_columns_{reduction.kind}",
        grid=ctas,
        specialized=True,
        scratch=(
            plgpu.SMEM((config.num_stages, COMPUTE_WARPGROUPS, tile_r, tile_n), x.dtype),
            plgpu.SMEM((COMPUTE_WARPGROUPS, tile_n), reduction.out),
            barriers(config.num_stages, COMPUTE_WARPGROUPS),
            barriers(config.num_stages, COMPUTE_WARPGROUPS),
        ),
    )(x)  # fmt: skip
    return out[:, :B].reshape(A, parts, B)


def _kernel(
    x_g: Any, o_g: Any, x_s: Any, o_s: Any, full: Any, empty: Any, *, reduction: Reduction, length: int, width: int,
    parts: int, steps: int, tile_r: int, tile_n: int, tiles: int, ctas: int, stages: int,
) -> None:  # fmt: skip
    warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
    num_tiles = count(cta, tiles, ctas)
    ragged = length % (steps * tile_r * parts) != 0
    across = -(-width // (COMPUTE_WARPGROUPS * tile_n))

    def place(number: Any) -> tuple[Any, Any]:
        """Index of a tile's part, along A and the parts, and its first column."""
        tile = cta + number * ctas
        return lax.div(tile, across), lax.rem(tile, across) * (COMPUTE_WARPGROUPS * tile_n)

    def first_row(part: Any, step: Any) -> Any:
        return (lax.rem(part, parts) * steps + step) * tile_r

    @pl.when(warpgroup == MEMORY_WARPGROUP)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def load(copy: Any) -> None:
            stage = lax.rem(copy, stages)
            part, column = place(lax.div(copy, steps))
            row = first_row(part, lax.rem(copy, steps))

            @pl.when(copy >= stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[stage])

            for owner in range(COMPUTE_WARPGROUPS):
                window = x_g.at[lax.div(part, parts), pl.ds(row, tile_r), pl.ds(column + owner * tile_n, tile_n)]
                plgpu.copy_gmem_to_smem(window, x_s.at[stage, owner], full.at[stage])

        for_each(0, num_tiles * steps, load)
        drain(empty, num_tiles * steps, stages)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")

        def tile(number: Any) -> None:
            part, column = place(number)

            def step(index: Any, total: jax.Array) -> jax.Array:
                stage = lax.rem(number * steps + index, stages)
                start = first_row(part, index)
                plgpu.barrier_wait(full.at[stage])
                for line in range(tile_r):
                    row = reduction.load(x_s[stage, warpgroup, line])
                    if ragged:  # past the end TMA fills with zeros
                        inside = jnp.full((tile_n,), start + line < length)
                        row = jnp.where(inside, row, reduction.start((tile_n,)))
                    total = reduction.join(total, row)
                plgpu.commit_smem()  # what was read must not be overwritten by the next copy before it was read
                plgpu.barrier_arrive(empty.at[stage])
                return total

            total = lax.fori_loop(0, steps, step, reduction.start((tile_n,)))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            o_s[warpgroup] = reduction.finish(total)
            plgpu.commit_smem()
            window = o_g.at[part, pl.ds(column + warpgroup * tile_n, tile_n)]
            plgpu.copy_smem_to_gmem(o_s.at[warpgroup], window)

        for_each(0, num_tiles, tile)
        plgpu.wait_smem_to_gmem(0)

"""The matrix product of a GPU of compute capability 9.0: persistent blocks of a memory and two compute warpgroups.

The memory warpgroup keeps `num_stages` steps of both operands on their way, across the borders of tiles. Each compute
warpgroup owns half of the rows of a tile, whose sums stay in registers; when they are done, they leave in slices
of one swizzled line, through two slots of its own, while the next tile's operands arrive:

    a [G, M, K] ── TMA ──► a_s [stage, tile_m, tile_k] ─┐ wgmma
                                                        ├──────► sums [tile_m / 2, tile_n] in registers
    b [G, K, N] ── TMA ──► b_s [stage, tile_k, tile_n] ─┘                │ a slice at a time
                   full[stage]     ▲          │                          ▼
                                   └── empty[stage]   out ◄── TMA ── o_s [warpgroup, slot]

The blocks of a cluster take neighbouring tiles, and each loads half of the operand that they share for both.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.capability import SWIZZLED_LINE
from opmux.plugins.mosaic_gpu.dot import sum_of_dots
from opmux.plugins.mosaic_gpu.matmul_terms import Terms
from opmux.plugins.mosaic_gpu.matmul_tiles import Axes, Tiles, extent, operand_indices, turned
from opmux.plugins.mosaic_gpu.pallas import (
    COMPUTE_WARPGROUPS,
    MEMORY_WARPGROUP,
    barriers,
    count,
    drain,
    for_each,
    launch,
    swizzled,
)

_SLOTS = 2
_SLICE_ROWS = 64


@dataclass(frozen=True)
class Product:
    """One product.

    Attributes:
      tiles: tiles of the output.
      terms: the sums that make it up.
      summed: batch axes of the operands that the output is summed over.
      length: K, of each of their elements.
      tile_k: the part of it that one step takes.
      batches: how many matrices a term of `a`, and of `b`, has.
      transposed: whether `a` is [G, K, M], and `b` [G, N, K].
      num_stages: steps that can be on their way.
      num_ctas: most blocks that run.
      swizzled: whether rows of the output are whole swizzled lines, or shorter than one.
    """

    tiles: Tiles
    terms: Terms
    summed: Axes
    length: int
    tile_k: int
    batches: tuple[int, int]
    transposed: tuple[bool, bool]
    num_stages: int
    num_ctas: int
    swizzled: bool

    @property
    def steps(self) -> int:
        """Steps of one pair of terms."""
        return extent(self.summed) * self.steps_of_one

    @property
    def steps_of_one(self) -> int:
        """Steps of one element of the axes that are summed over."""
        return -(-self.length // self.tile_k)

    @property
    def operand_tiles(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of what one step takes of `a` and of `b`."""
        a, b = (self.tiles.tile_m, self.tile_k), (self.tile_k, self.tiles.tile_n)
        return turned(a, self.transposed[0]), turned(b, self.transposed[1])

    @property
    def ctas(self) -> int:
        """Clusters that run, or blocks where there are none."""
        return max(1, min(self.num_ctas // (self.tiles.cluster_m * self.tiles.cluster_n), self.tiles.total))

    def parts(self, step: Any, batches: tuple[Any, Any]) -> tuple[tuple[Any, Any], Any]:
        """Where the operands of a step of a tile are: their batch indices, and which part of K."""
        a_at, b_at = batches
        if self.terms.pairs > 1:
            pair, step = _divide(step, self.steps)
            a_term, b_term = self.terms.indices(pair)
            a_at, b_at = a_at + a_term * self.batches[0], b_at + b_term * self.batches[1]
        if self.summed:
            index, step = _divide(step, self.steps_of_one)
            a_more, b_more = operand_indices(self.summed, index)
            a_at, b_at = a_at + a_more, b_at + b_more
        return (a_at, b_at), step


def multiply(a: jax.Array, b: jax.Array, out: jax.ShapeDtypeStruct, product: Product) -> jax.Array:
    """Multiplies two operands that TMA can cut into swizzled tiles.

    Args:
      a, b: [terms * G, rows, columns] of one dtype; what lies past the end of one of them counts as zero.
      out: [G, M, N], of the sums' dtype, or a float of 16 bits for sums in float32; rows are a multiple of 16 bytes,
        and M one of eight, or less than that.
      product: how.
    """
    tiles, stages = product.tiles, product.num_stages
    a_tile, b_tile = product.operand_tiles
    slots = (COMPUTE_WARPGROUPS, _SLOTS, _SLICE_ROWS, SWIZZLED_LINE // out.dtype.itemsize)
    shared = ("peer",) if tiles.cluster_m * tiles.cluster_n > 1 else ()
    empty: Any = barriers(stages, COMPUTE_WARPGROUPS)
    if shared:  # a slot is free when both blocks have read it
        empty = plgpu.ClusterBarrier(collective_axes=shared, num_arrivals=COMPUTE_WARPGROUPS, num_barriers=stages)
    return launch(
        functools.partial(_kernel, product=product),
        out,
        name="matmul",
        grid=product.ctas,
        specialized=True,
        cluster={"peer": tiles.cluster_m * tiles.cluster_n} if shared else None,
        scratch=(
            swizzled((stages, *a_tile), a.dtype),
            swizzled((stages, *b_tile), b.dtype),
            swizzled(slots, out.dtype) if product.swizzled else _core_matrices(slots, out.dtype),
            barriers(stages, 2),
            empty,
        ),
    )(a, b)


def _core_matrices(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory in tiles of eight rows of 16 bytes, which any row that TMA can address is a whole number of."""
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, 16 // np.dtype(dtype).itemsize)),))


def _kernel(
    a_g: Any, b_g: Any, o_g: Any, a_s: Any, b_s: Any, o_s: Any, full: Any, empty: Any, *, product: Product
) -> None:
    tiles, stages = product.tiles, product.num_stages
    warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
    peer = lax.axis_index("peer") if tiles.cluster_m * tiles.cluster_n > 1 else 0
    num_tiles = count(cta, tiles.total, product.ctas)
    steps = product.steps * product.terms.pairs

    def stage(copy: Any) -> Any:
        return copy & (stages - 1) if stages & (stages - 1) == 0 else lax.rem(copy, stages)

    @pl.when(warpgroup == MEMORY_WARPGROUP)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def load_tile(number: Any) -> None:
            batch, row, column = tiles.place(cta + number * product.ctas, peer)
            batches = operand_indices(tiles.batch, batch)

            def load(step: Any) -> None:
                copy = number * steps + step
                slot = stage(copy)

                @pl.when(copy >= stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[slot])

                (a_at, b_at), part = product.parts(step, batches)
                k = pl.ds(part * product.tile_k, product.tile_k)
                rows, columns = pl.ds(row, tiles.tile_m), pl.ds(column, tiles.tile_n)
                a_window = a_g.at[a_at, k, rows] if product.transposed[0] else a_g.at[a_at, rows, k]
                b_window = b_g.at[b_at, columns, k] if product.transposed[1] else b_g.at[b_at, k, columns]
                # Blocks beside each other share rows of `a`, and those below each other columns of `b`.
                a_peers, b_peers = ("peer" if size > 1 else None for size in (tiles.cluster_n, tiles.cluster_m))
                plgpu.copy_gmem_to_smem(a_window, a_s.at[slot], full.at[slot], collective_axes=a_peers)
                plgpu.copy_gmem_to_smem(b_window, b_s.at[slot], full.at[slot], collective_axes=b_peers)

            for_each(0, steps, load)

        for_each(0, num_tiles, load_tile)
        drain(empty, num_tiles * steps, stages)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        half = tiles.tile_m // COMPUTE_WARPGROUPS
        own = pl.ds(warpgroup * half, half)

        def compute_tile(number: Any) -> None:
            batch, row, column = tiles.place(cta + number * product.ctas, peer)

            def sums(first: int, number_of: int, acc: jax.Array | None = None) -> jax.Array:
                """Adds some steps of the tile, from the `first` one."""

                def operands(step: Any) -> tuple[Any, Any]:
                    slot = stage(number * steps + first + step)
                    plgpu.barrier_wait(full.at[slot])
                    rows = a_s.at[slot, :, own] if product.transposed[0] else a_s.at[slot, own]
                    return rows, b_s.at[slot]

                return sum_of_dots(
                    number_of,
                    operands,
                    lambda step: plgpu.barrier_arrive(empty.at[stage(number * steps + first + step)]),
                    shape=(half, tiles.tile_n),
                    dtype=a_s.dtype,
                    acc=acc,
                    transpose_a=product.transposed[0],
                    transpose_b=product.transposed[1],
                )

            lower = steps - product.steps
            total = sums(lower, product.steps, product.terms.finite(sums(0, lower)) if lower else None)
            _store(total, o_g.at[batch], o_s.at[warpgroup], row + warpgroup * half, column, number)

        for_each(0, num_tiles, compute_tile)
        plgpu.wait_smem_to_gmem(0)


def _divide(number: Any, divisor: int) -> tuple[Any, Any]:
    """Quotient and remainder of a number that is not negative."""
    return lax.div(number, divisor), lax.rem(number, divisor)


def _store(total: jax.Array, out_g: Any, slots: Any, row: Any, column: Any, number: Any) -> None:
    """Stores the sums of a tile slice by slice, each through the slot that was stored from the longest ago."""
    _, rows, columns = slots.shape
    places = [(m, n) for m in range(0, total.shape[0], rows) for n in range(0, total.shape[1], columns)]
    even = len(places) % _SLOTS == 0  # else each tile begins with another slot than the one before
    for index, (m, n) in enumerate(places):
        slot = index % _SLOTS if even else lax.rem(number * len(places) + index, _SLOTS)
        plgpu.wait_smem_to_gmem(_SLOTS - 1, wait_read_only=True)
        slots[slot] = total[m : m + rows, n : n + columns].astype(slots.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slots.at[slot], out_g.at[pl.ds(row + m, rows), pl.ds(column + n, columns)])

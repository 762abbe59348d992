"""`add` on a GPU of compute capability 9.0 or 10.x.

Large arrays stream through shared memory. A memory warpgroup keeps `num_stages` tiles of each operand on their way;
two compute warpgroups add half a tile each, and store it by TMA from one of two slots:

    x, y in HBM ── TMA ──► x_s, y_s [stage] ──► registers ──► o_s [warpgroup, slot] ── TMA ──► out in HBM
                   full[stage]    ▲                 │
                                  └── empty[stage] ─┘

An operand that is broadcast along rows or columns is loaded as one row or one column of the tile, and never
materialised. What TMA cannot address, rows that do not begin at a multiple of 16 bytes, is broadcast by XLA and goes
through registers as one flat array, as small arrays do.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.core.config import Config
from opmux.core.ops.add import outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_gpu.add_config import AddConfig
from opmux.plugins.mosaic_gpu.broadcast import Layout, Operand, layout
from opmux.plugins.mosaic_gpu.pallas import (
    COMPUTE_WARPGROUPS,
    MEMORY_WARPGROUP,
    barriers,
    count,
    drain,
    for_each,
    launch,
    pad_for_simulator,
    padded_for_simulator,
    wide,
)

_LANES = 128


def add(request: Request, operands: Operands, config: Config) -> Outputs:
    """Adds tile by tile.

    Args:
      request: a request of `add`.
      operands: `x` and `y`, of one rank and dtype, each axis of equal length or 1.
      config: an `AddConfig`.
    """
    config = cast(AddConfig, config)
    out = outputs(request)["out"]
    if not out.size:
        return {"out": jnp.zeros(out.shape, out.dtype)}
    x, y = operands["x"], operands["y"]
    lay = _rows_of_lanes(layout(x.shape, y.shape))
    aligned = lay.columns * out.dtype.itemsize % 16 == 0 and lay.columns >= _LANES // 2 and lay.rows > 1
    if aligned and out.nbytes >= config.tma_bytes:
        result = _add_tiles(x, y, lay, config)
    else:
        x, y = (array if array.size == 1 else jnp.broadcast_to(array, out.shape) for array in (x, y))
        result = _add_flat(x.reshape(-1), y.reshape(-1), config)
    return {"out": result.reshape(out.shape)}


def _rows_of_lanes(lay: Layout) -> Layout:
    """A flat addition as rows of 256 or 128 columns, if it is that many."""
    for columns in (2 * _LANES, _LANES):
        if lay.is_flat and lay.columns % columns == 0:
            rows = lay.columns // columns
            x, y = (Operand((1, rows, columns) if side.shape[2] > 1 else side.shape, ()) for side in (lay.x, lay.y))
            return Layout((), rows, columns, x, y)
    return lay


# Flat: registers only.


def _add_flat(x: jax.Array, y: jax.Array, config: AddConfig) -> jax.Array:
    size, block = max(x.size, y.size), config.block_size
    if short := max(_LANES - size, 0):
        x, y = (array if array.size == 1 < size else jnp.pad(array, (0, short)) for array in (x, y))
    out = jax.ShapeDtypeStruct((size + short,), x.dtype)
    kernel = functools.partial(_flat_kernel, size=size + short, block=block)
    result = launch(kernel, out, name="add_flat", grid=max(1, (size + short) // block))(x, y)
    return result[:size] if short else result


def _flat_kernel(x_g: Any, y_g: Any, o_g: Any, *, size: int, block: int) -> None:
    def add_at(start: Any, length: int) -> None:
        at = pl.ds(start, length)
        x, y = (ref[0] if ref.shape == (1,) else wide(ref[at]) for ref in (x_g, y_g))
        o_g[at] = jnp.add(x, y)

    cta = lax.axis_index("cta")
    whole = size // block
    if whole:
        add_at(cta * block, block)

    # The last block also adds what is left over, which it alone may overlap.
    @pl.when(cta == max(whole - 1, 0))
    def _() -> None:
        start = whole * block
        for length in _halves(block):
            if size - start >= length:
                add_at(start, length)
                start += length
        if start < size:
            add_at(size - _LANES, _LANES)


def _halves(block: int) -> list[int]:
    """Half of the block, half of that, and so on, down to one element a lane."""
    return [block >> shift for shift in range(1, block.bit_length()) if (block >> shift) % _LANES == 0]


# Tiles: TMA, a memory warpgroup and two compute warpgroups.


@dataclass(frozen=True)
class _Tiles:
    """The tiles of an output of [batch, rows, columns], in the order in which blocks take them."""

    lay: Layout
    tile_m: int
    tile_n: int

    @property
    def grid(self) -> tuple[int, int, int]:
        return math.prod(self.lay.batch), -(-self.lay.rows // self.tile_m), -(-self.lay.columns // self.tile_n)

    @property
    def total(self) -> int:
        return math.prod(self.grid)

    def place(self, tile: Any) -> tuple[Any, Any, Any]:
        """Batch index, first row and first column of a tile."""
        _, m, n = self.grid
        return lax.div(tile, m * n), lax.rem(lax.div(tile, n), m) * self.tile_m, lax.rem(tile, n) * self.tile_n

    def batch_of(self, operand: Operand, batch: Any) -> Any:
        """The batch index of an operand for one of the output."""
        index, rest = 0, batch
        for size, stride in reversed(list(zip(self.lay.batch, operand.batch_strides, strict=True))):
            index, rest = index + lax.rem(rest, size) * stride, lax.div(rest, size)
        return index


def _add_tiles(x: jax.Array, y: jax.Array, lay: Layout, config: AddConfig) -> jax.Array:
    dtype = x.dtype
    tile_m, tile_n, stages = config.tile_m * (4 // dtype.itemsize), config.tile_n, config.num_stages
    tiles = _Tiles(lay, tile_m, tile_n)
    half = tile_m // COMPUTE_WARPGROUPS
    kinds = [_kind(operand) for operand in (lay.x, lay.y)]
    tile_shapes = {"tile": (tile_m, tile_n), "row": (tile_n,), "column": (tile_m,)}
    given = [
        _operand(array, side, kind, tile_shapes)
        for array, side, kind in zip((x, y), (lay.x, lay.y), kinds, strict=True)
    ]

    batch = math.prod(lay.batch)
    shape = (batch, *padded_for_simulator((lay.rows, lay.columns), (tile_m, tile_n)))
    ctas = min(config.num_ctas, tiles.total)
    copies = sum(kind != "scalar" for kind in kinds)
    result = launch(
        functools.partial(_tiles_kernel, tiles=tiles, kinds=kinds, ctas=ctas, stages=stages),
        jax.ShapeDtypeStruct(shape, dtype),
        name="add_tiles",
        grid=ctas,
        specialized=True,
        scratch=(
            *(plgpu.SMEM((stages, *tile_shapes.get(kind, (_LANES,))), dtype) for kind in kinds),
            plgpu.SMEM((COMPUTE_WARPGROUPS, 2, half, tile_n), dtype),
            barriers(stages, copies),
            barriers(stages, COMPUTE_WARPGROUPS),
        ),
    )(*given)
    return result[:, : lay.rows, : lay.columns]


def _kind(operand: Operand) -> str:
    _, rows, columns = operand.shape
    if columns == 1:
        return "column" if rows > 1 else "scalar"
    return "tile" if rows > 1 else "row"


def _operand(array: jax.Array, operand: Operand, kind: str, tile_shapes: dict[str, tuple[int, ...]]) -> jax.Array:
    """The operand as TMA addresses it: [batch, ...tile axes]; a scalar as [1]."""
    if kind == "scalar":
        return array.reshape(1)
    batch, rows, columns = operand.shape
    array = array.reshape(batch, *(size for size in (rows, columns) if size > 1))
    if kind == "column":
        # The start of a batch element has to be a multiple of 16 bytes.
        array = jnp.pad(array, ((0, 0), (0, -rows % (16 // array.dtype.itemsize))))
    return pad_for_simulator(array, (1, *tile_shapes[kind]))


def _tiles_kernel(
    x_g: Any, y_g: Any, o_g: Any, x_s: Any, y_s: Any, o_s: Any, full: Any, empty: Any,
    *, tiles: _Tiles, kinds: list[str], ctas: int, stages: int,
) -> None:  # fmt: skip
    warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
    num_tiles = count(cta, tiles.total, ctas)
    half = tiles.tile_m // COMPUTE_WARPGROUPS

    @pl.when(warpgroup == MEMORY_WARPGROUP)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def load(number: Any) -> None:
            stage = lax.rem(number, stages)
            batch, row, column = tiles.place(cta + number * ctas)

            @pl.when(number >= stages)
            def _() -> None:
                plgpu.barrier_wait(empty.at[stage])

            windows = {"tile": (pl.ds(row, tiles.tile_m), pl.ds(column, tiles.tile_n))}
            windows |= {"row": windows["tile"][1:], "column": windows["tile"][:1]}
            for source, target, side, kind in zip(
                (x_g, y_g), (x_s, y_s), (tiles.lay.x, tiles.lay.y), kinds, strict=True
            ):
                if kind != "scalar":
                    window = source.at[(tiles.batch_of(side, batch), *windows[kind])]
                    plgpu.copy_gmem_to_smem(window, target.at[stage], full.at[stage])

        for_each(0, num_tiles, load)
        drain(empty, num_tiles, stages)

    @pl.when(warpgroup < COMPUTE_WARPGROUPS)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        first = warpgroup * half
        scalars = [ref[0] if kind == "scalar" else None for ref, kind in zip((x_g, y_g), kinds, strict=True)]

        def compute(number: Any) -> None:
            stage, slot = lax.rem(number, stages), lax.rem(number, 2)
            batch, row, column = tiles.place(cta + number * ctas)
            plgpu.barrier_wait(full.at[stage])
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the slot's last store has been read

            if set(kinds) <= {"tile", "scalar"}:
                x, y = (
                    wide(ref[stage, pl.ds(first, half)]) if scalar is None else scalar
                    for ref, scalar in zip((x_s, y_s), scalars, strict=True)
                )
                o_s[warpgroup, slot] = jnp.add(x, y)
            else:
                rows = [ref[stage] if kind == "row" else None for ref, kind in zip((x_s, y_s), kinds, strict=True)]
                for line in range(half):
                    x, y = (
                        ref[stage, first + line] if known is None else known
                        for ref, known in zip((x_s, y_s), rows, strict=True)
                    )
                    o_s[warpgroup, slot, line] = jnp.add(x, y)

            plgpu.commit_smem()
            plgpu.barrier_arrive(empty.at[stage])
            window = o_g.at[batch, pl.ds(row + first, half), pl.ds(column, tiles.tile_n)]
            plgpu.copy_smem_to_gmem(o_s.at[warpgroup, slot], window)

        for_each(0, num_tiles, compute)
        plgpu.wait_smem_to_gmem(0)

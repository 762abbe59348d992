"""The cotangent of an attention's bias as a Mosaic TPU kernel: cotangents of scores, summed as the bias broadcasts.

The axes along which the bias has length 1 are the last ones of the grid, so that a block of the cotangent is summed
up in VMEM, over batch elements and heads too, before it is written, and memory is that of the bias:

    grid:  axes that the bias has, then axes that it has not
    acc [kv, q] += d_scores ──► after the last of those: summed down or across where the bias has one key or one row
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core.request import Operands, Request
from opmux.plugins.mosaic_tpu import attention_operands as lay
from opmux.plugins.mosaic_tpu.attention_tile import Tile
from opmux.plugins.mosaic_tpu.attention_tiling import Tiling, all_of, when
from opmux.plugins.mosaic_tpu.attention_vjp_tile import place_saved, weights_and_cotangents

if TYPE_CHECKING:
    from opmux.plugins.mosaic_tpu.attention_config import AttentionVjpConfig


def bias_cotangent(
    request: Request, operands: Operands, saved: dict[str, jax.Array], config: AttentionVjpConfig
) -> jax.Array:
    """The cotangent of the bias, in its shape and dtype.

    Args:
      request: a request of `attention_vjp` with a bias.
      operands: its operands.
      saved: the arrays that the backward kernels read besides masks.
      config: an `AttentionVjpConfig`.
    """
    tiling = Tiling.of(request, config.block_q, config.block_kv, config.chunk_q)
    b_size, n_size, t_size, s_size = request["bias"].shape
    kept_heads = n_size > 1
    kept = (b_size > 1, kept_heads, kept_heads, t_size > 1, s_size > 1)
    order = sorted(range(5), key=lambda axis: not kept[axis])
    placed = {
        name: _reordered(each, order)
        for name, each in {**place_saved(tiling, saved), **lay.masks(tiling, operands)}.items()
    }
    block = (tiling.kv if s_size > 1 else 1, tiling.q if t_size > 1 else 1)

    def at(*grid: Any) -> tuple[Any, ...]:
        b, h, g, i, j = _canonical(grid, order)
        place = (b, h * tiling.G + g, j, i)
        return tuple(
            index if size > 1 else 0 for index, size in zip(place, (b_size, n_size, s_size, t_size), strict=True)
        )

    results = lay.call(
        lambda prefetched, refs: _kernel(tiling, prefetched, refs, order, kept),
        tiling,
        operands,
        placed,
        outputs={
            "bias": ((b_size, n_size, s_size, t_size), jnp.float32, pl.BlockSpec((None, None, *block), at)),
        },
        scratch={"acc": pltpu.VMEM((tiling.kv, tiling.q), jnp.float32)},
        grid=tuple(tiling.grid[axis] for axis in order),
        semantics=tuple("parallel" if kept[axis] else "arbitrary" for axis in order),
        vmem_limit_bytes=config.vmem_limit_bytes,
        name="attention_vjp_bias",
    )
    return jnp.swapaxes(results["bias"], 2, 3).astype(request["bias"].dtype)


def _kernel(
    tiling: Tiling, prefetched: tuple[Any, ...], refs: dict[str, Any], order: list[int], kept: tuple[bool, ...]
) -> None:
    ids = _canonical([pl.program_id(axis) for axis in range(5)], order)
    b, _, _, i, j = ids
    bounds = tiling.bounds(b, prefetched)
    tile = Tile(tiling, refs, bounds, i, j)
    summed = [axis for axis in range(5) if not kept[axis]]

    def zero() -> None:
        refs["acc"][...] = jnp.zeros(refs["acc"].shape, jnp.float32)

    def add() -> None:
        for chunk in range(tiling.chunks):
            _, d_scores = weights_and_cotangents(tile, chunk, masked=True, of_products=False)
            refs["acc"][:, tile.rows(chunk)] += d_scores

    def store() -> None:
        total = refs["acc"][...]
        for axis, length in enumerate(refs["out_bias"].shape):
            if length == 1:
                total = jnp.sum(total, axis=axis, keepdims=True)
        refs["out_bias"][...] = total

    when(all_of([ids[axis] == 0 for axis in summed]), zero)
    when(tiling.runs(i, j, bounds), add)
    when(all_of([ids[axis] == tiling.grid[axis] - 1 for axis in summed]), store)


def _canonical(grid: Any, order: list[int]) -> list[Any]:
    """Indices of the reordered grid in the order of the tiling's."""
    return [grid[order.index(axis)] for axis in range(5)]


def _reordered(placed: lay.Placed, order: list[int]) -> lay.Placed:
    """The operand of a grid whose axes stand in another order."""
    spec = placed.spec
    index_map: Any = spec.index_map

    def at(*indices: Any) -> Any:
        return index_map(*_canonical(indices[:5], order), *indices[5:])

    return lay.Placed(placed.array, pl.BlockSpec(spec.block_shape, at))

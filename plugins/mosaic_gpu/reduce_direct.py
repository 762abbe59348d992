"""Reduces the first axis of a small [R, C] through registers alone: one warpgroup for each block of columns."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from opmux.plugins.mosaic_gpu.pallas import launch, wide
from opmux.plugins.mosaic_gpu.reduction import Reduction

_LANES = 128
_ROWS_AT_ONCE = 8


def reduce_direct(x: jax.Array, reduction: Reduction) -> jax.Array:
    """Reduces [R, C] to [C].

    Args:
      x: the operand; C is padded to whole blocks.
      reduction: what to do.
    """
    R, C = x.shape
    most = 16 // _narrowest(x.dtype, reduction) * _LANES
    width = next((width for width in (most, most // 2, most // 4) if C % width == 0), min(most, C + -C % _LANES))
    x = jnp.pad(x, ((0, 0), (0, -C % width))) if C % width else x
    out = launch(
        functools.partial(_kernel, reduction=reduction, length=R, width=width),
        jax.ShapeDtypeStruct(x.shape[1:], reduction.out),
        name=f"reduce_direct_{reduction.kind}",
        grid=x.shape[1] // width,
    )(x)
    return out[:C]


def _narrowest(dtype: np.dtype[Any], reduction: Reduction) -> int:
    """Bytes of the narrower of operand and result, which is to be accessed 16 bytes at a time."""
    return min(dtype.itemsize, reduction.out.itemsize)


def _kernel(x_g: Any, o_g: Any, *, reduction: Reduction, length: int, width: int) -> None:
    itemsize = _narrowest(x_g.dtype, reduction)
    at = pl.ds(lax.axis_index("cta") * width, width)

    def rows(first: Any, number: int, total: jax.Array) -> jax.Array:
        # All loads are under way before the first of them is needed.
        loaded = [wide(x_g[first + row, at], itemsize) for row in range(number)]
        for row in loaded:
            total = reduction.join(total, reduction.load(row))
        return total

    whole, rest = divmod(length, _ROWS_AT_ONCE)
    total = wide(reduction.start((width,)), itemsize)
    if whole:
        total = lax.fori_loop(0, whole, lambda group, total: rows(group * _ROWS_AT_ONCE, _ROWS_AT_ONCE, total), total)
    o_g[at] = reduction.finish(rows(whole * _ROWS_AT_ONCE, rest, total))

"""`add` as a portable Pallas kernel."""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from opmux.core.config import Config
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.interpret.dense_config import AddConfig, trailing_blocks
from opmux.plugins.interpret.leading_batch import leading_batch


def add(request: Request, operands: Operands, config: Config) -> Outputs:
    """Adds block by block; an axis along which an operand is broadcast is never materialised.

    Args:
      request: a request of `add`.
      operands: `x` and `y`, of one rank and dtype, each axis of equal length or 1.
      config: an `AddConfig`.
    """
    block_size = cast(AddConfig, config).block_size
    run = leading_batch(functools.partial(_sum, block_size=block_size))
    return {"out": run(operands["x"], operands["y"])}


def _sum(x: jax.Array, y: jax.Array, block_size: int) -> jax.Array:
    """The sum of two arrays of one rank and dtype."""
    out_shape = np.broadcast_shapes(x.shape, y.shape)
    if 0 in out_shape:
        # Pallas has no grid over nothing.
        return jnp.zeros(out_shape, x.dtype)
    # Axes that both operands have in full, or that the same one broadcasts along, are one axis in memory.
    groups = _groups(x.shape, y.shape)
    x, y = (array.reshape([_length(array.shape, group) for group in groups]) for array in (x, y))
    shape = tuple(_length(out_shape, group) for group in groups)
    block = trailing_blocks(shape, block_size)

    def spec(sizes: tuple[int, ...]) -> pl.BlockSpec:
        whole = [size == full for size, full in zip(sizes, shape, strict=True)]
        return pl.BlockSpec(
            tuple(length if kept else 1 for length, kept in zip(block, whole, strict=True)),
            lambda *at: tuple(number if kept else 0 for number, kept in zip(at, whole, strict=True)),
        )

    out = pl.pallas_call(
        _add_kernel,
        grid=tuple(map(pl.cdiv, shape, block)),
        in_specs=[spec(x.shape), spec(y.shape)],
        out_specs=spec(shape),
        out_shape=jax.ShapeDtypeStruct(shape, x.dtype),
        interpret=True,
        name="add",
    )(x, y)
    return out.reshape(out_shape)


def _add_kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = jnp.add(x_ref[...], y_ref[...])


def _groups(x: tuple[int, ...], y: tuple[int, ...]) -> list[list[int]]:
    """Runs of neighbouring axes along which the operands broadcast in the same way."""
    groups: list[list[int]] = []
    last: tuple[bool, bool] | None = None
    for axis, (m, n) in enumerate(zip(x, y, strict=True)):
        if m == n == 1:
            continue
        how = (m == 1, n == 1)
        if how != last:
            groups.append([])
        groups[-1].append(axis)
        last = how
    return groups or [[]]


def _length(shape: tuple[int, ...], group: list[int]) -> int:
    return math.prod(shape[axis] for axis in group)

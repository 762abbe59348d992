"""`add` as a portable Pallas kernel."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from opmux.core.config import Config
from opmux.core.ops.add import outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.interpret.dense_config import AddConfig, trailing_blocks


def add(request: Request, operands: Operands, config: Config) -> Outputs:
    """Adds block by block; an axis along which an operand is broadcast is never materialised.

    Args:
      request: a request of `add`.
      operands: `x` and `y`, of one rank and dtype, each axis of equal length or 1.
      config: an `AddConfig`.
    """
    out = outputs(request)["out"]
    if not out.size:
        # Pallas has no grid over nothing.
        return {"out": jnp.zeros(out.shape, out.dtype)}
    x, y = operands["x"], operands["y"]
    # Axes that both operands have in full, or that the same one broadcasts along, are one axis in memory.
    groups = _groups(x.shape, y.shape)
    x, y = (array.reshape([_length(array.shape, group) for group in groups]) for array in (x, y))
    shape = tuple(_length(out.shape, group) for group in groups)
    block = trailing_blocks(shape, cast(AddConfig, config).block_size)

    def spec(sizes: tuple[int, ...]) -> pl.BlockSpec:
        whole = [size == full for size, full in zip(sizes, shape, strict=True)]
        return pl.BlockSpec(
            tuple(length if kept else 1 for length, kept in zip(block, whole, strict=True)),
            lambda *at: tuple(number if kept else 0 for number, kept in zip(at, whole, strict=True)),
        )

    result = pl.pallas_call(
        _add_kernel,
        grid=tuple(pl.cdiv(size, length) for size, length in zip(shape, block, strict=True)),
        in_specs=[spec(x.shape), spec(y.shape)],
        out_specs=spec(shape),
        out_shape=jax.ShapeDtypeStruct(shape, out.dtype),
        interpret=True,
        name="add",
    )(x, y)
    return {"out": result.reshape(out.shape)}


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
    length = 1
    for axis in group:
        length *= shape[axis]
    return length

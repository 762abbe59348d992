"""`add` as a Mosaic TPU kernel.

Each operand comes block by block through VMEM; an axis along which an operand is broadcast has one block of length
1, which is spread over sublanes or lanes in registers and never written to HBM:

    x [.., M, N] ──► x block [l, m, n] ─┐
                                        ├─► + ──► out block [l, m, n] ──► out [.., M, N]
    y [.., 1, N] ──► y block [l, 1, n] ─┘

The two last axes are tiled in memory, so they stay as they are; the ones before them are merged where that is free.
"""

from __future__ import annotations

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core import compat
from opmux.core.config import Config
from opmux.core.ops.add import outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu.dense_config import AddConfig


def add(request: Request, operands: Operands, config: Config) -> Outputs:
    """Adds block by block.

    Args:
      request: a request of `add`.
      operands: `x` and `y`, of one rank and dtype, each axis of equal length or 1.
      config: an `AddConfig`.
    """
    config = cast(AddConfig, config)
    out = outputs(request)["out"]
    if not out.size:
        # Pallas has no grid over nothing.
        return {"out": jnp.zeros(out.shape, out.dtype)}
    x, y = operands["x"], operands["y"]
    x, y = compat.vary_like(x, [y]), compat.vary_like(y, [x])

    x_shape, y_shape = merged_shapes(x.shape, y.shape)
    shape = tuple(map(max, x_shape, y_shape))
    block = block_shape(shape, config)

    def spec(sizes: tuple[int, ...]) -> pl.BlockSpec:
        whole = [size == full for size, full in zip(sizes, shape, strict=True)]
        return pl.BlockSpec(
            tuple(length if kept else 1 for length, kept in zip(block, whole, strict=True)),
            lambda *at: tuple(number if kept else 0 for number, kept in zip(at, whole, strict=True)),
        )

    grid = tuple(pl.cdiv(size, length) for size, length in zip(shape, block, strict=True))
    result = pl.pallas_call(
        _add_kernel,
        grid=grid,
        in_specs=[spec(x_shape), spec(y_shape)],
        out_specs=spec(shape),
        out_shape=jax.ShapeDtypeStruct(shape, out.dtype, manual_axis_type=jax.typeof(x).manual_axis_type),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * len(grid), vmem_limit_bytes=config.vmem_limit_bytes
        ),
        name="add",
    )(x.reshape(x_shape), y.reshape(y_shape))
    return {"out": result.reshape(out.shape)}


def _add_kernel(x_ref: Any, y_ref: Any, out_ref: Any) -> None:
    out_ref[...] = x_ref[...] + y_ref[...]


def merged_shapes(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of at least two axes, in which leading axes that broadcast in the same way are one."""
    pad = (1,) * max(0, 2 - len(x))
    x, y = pad + x, pad + y
    groups: list[tuple[tuple[bool, bool], list[int]]] = []
    for axis, (m, n) in enumerate(zip(x[:-2], y[:-2], strict=True)):
        if m == n == 1:
            continue
        how = (m == 1, n == 1)
        if not groups or groups[-1][0] != how:
            groups.append((how, []))
        groups[-1][1].append(axis)

    def merge(shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*(math.prod(shape[axis] for axis in axes) for _, axes in groups), *shape[-2:])

    return merge(x), merge(y)


def block_shape(shape: tuple[int, ...], config: AddConfig) -> tuple[int, ...]:
    """The block: what the config says of the last three axes, if they are that long, and 1 along the others."""
    most = (*(1 for _ in shape[:-3]), config.block_leading, config.block_rows, config.block_lanes)[-len(shape) :]
    return tuple(map(min, shape, most))

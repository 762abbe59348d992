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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core import compat
from opmux.core.config import Config
from opmux.core.ops.add import outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu.dense_config import LANES, STRIP_LANES, STRIP_ROWS, SUBLANES, AddConfig, round_up


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
    leading, rows, lanes = shape[-3:]
    block = (
        min(config.block_leading, leading),
        min(config.block_rows, round_up(rows, STRIP_ROWS) if rows > STRIP_ROWS else rows),
        min(config.block_lanes, lanes),
    )

    def spec(sizes: tuple[int, ...]) -> pl.BlockSpec:
        whole = [size == full for size, full in zip(sizes, shape, strict=True)]
        return pl.BlockSpec(
            (*(None for _ in shape[:-3]), *(n if kept else 1 for n, kept in zip(block, whole[-3:], strict=True))),
            lambda *at: tuple(number if kept else 0 for number, kept in zip(at, whole, strict=True)),
        )

    grid = (*shape[:-3], *map(pl.cdiv, shape[-3:], block))
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
    block = out_ref.shape
    # A strip at a time, since what is in flight has to fit in registers.
    strip = (1, STRIP_ROWS if block[1] % STRIP_ROWS == 0 else block[1], block[2])
    if block[1] == 1 and block[2] % STRIP_LANES == 0:
        strip = (1, 1, STRIP_LANES)
    turns = [full // some for full, some in zip(block, strip, strict=True)]

    def add_strip(at: tuple[Any, ...]) -> None:
        def of(ref: Any) -> tuple[Any, ...]:
            return tuple(
                pl.ds(0, 1) if size == 1 else slice(None) if turn == 1 else pl.ds(pl.multiple_of(i * some, some), some)
                for i, size, some, turn in zip(at, ref.shape, strip, turns, strict=True)
            )

        out_ref[of(out_ref)] = x_ref[of(x_ref)] + y_ref[of(y_ref)]

    def loop(at: tuple[Any, ...]) -> None:
        if len(at) == len(turns):
            add_strip(at)
        elif turns[len(at)] == 1:
            loop((*at, 0))
        else:
            lax.fori_loop(0, turns[len(at)], lambda i, _: loop((*at, i)), None)

    loop(())


def merged_shapes(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of at least three axes, in which leading axes that broadcast in the same way are one."""
    if len(x) == 1 and x == y and x[0] % (SUBLANES * LANES) == 0:
        # A vector lies in memory as rows of 128 do.
        x = y = (x[0] // LANES, LANES)
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
        leading = [math.prod(shape[axis] for axis in axes) for _, axes in groups] or [1]
        return (*leading, *shape[-2:])

    return merge(x), merge(y)

"""`reduce` as Mosaic TPU kernels: one for the last axis, and two for an axis before it.

The last axis lies along lanes. Blocks are added lane by lane into an accumulator of 128 lanes, and only its own
lanes are joined, once, across rows of its transpose, so that the results lie along lanes as they do in HBM:

    x [A, R] ──► block [a, r] ──► r/128 slices [a, 128] ──► acc [a, 128] ──► transposed ──► out [1, a]
                 masked past R     one after the other       over blocks       after the last block

An axis before the last lies along sublanes. Rows are added register by register into an accumulator of 8 rows:

    x [A, R, B] ──► block [a, r, b] ──► chunks [128, strip] ──► acc [a, 8, b] ──► 8 rows to 1 ──► out [a, 1, b]
                    masked past R        in a loop               over blocks       after the last block

and where R has a few rows only, so that most of 8 accumulated rows would be empty, blocks of several elements of A
are reduced at once.
"""

from __future__ import annotations

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core.config import Config
from opmux.core.ops.reduce import ReduceParams
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu import combine
from opmux.plugins.mosaic_tpu.dense_config import (
    CHUNK,
    LANES,
    PACKED_ROWS,
    SHORT,
    SUBLANES,
    ReduceConfig,
    compute_dtype,
    round_up,
)


def reduce(request: Request, operands: Operands, config: Config) -> Outputs:
    """Reduces every second axis, the last of them first.

    Args:
      request: a request of `reduce`.
      operands: `x`, [A, R, B] or with more pairs of a reduced and a kept axis.
      config: a `ReduceConfig`.
    """
    config = cast(ReduceConfig, config)
    params: ReduceParams = request.params
    x = operands["x"]
    how = combine.Reduction("sum" if params.kind == "mean" else params.kind, compute_dtype(params.acc))
    finish = functools.partial(_finish, params=params, length=math.prod(x.shape[1::2]))
    if not x.size:
        # Pallas has no grid over nothing; and nothing reduces to the identity.
        return {"out": finish(jnp.full(x.shape[::2], how.identity, how.dtype))}
    out_shape = x.shape[::2]
    while x.ndim > 3:
        *before, B, R, C = x.shape
        part = _reduce(x.reshape(math.prod(before) * B, R, C), how, lambda total: total, how.dtype, config)
        x = part.reshape(*before, B * C)
    return {"out": _reduce(x, how, finish, params.dtype, config).reshape(out_shape)}


def _reduce(x: jax.Array, how: combine.Reduction, finish: Any, dtype: Any, config: ReduceConfig) -> jax.Array:
    """Reduces [A, R, B] over R."""
    A, R, B = x.shape
    if B > 1:
        return (_reduce_rows if R > SHORT else _reduce_short)(x, how, finish, dtype, config)
    if A == 1 and R % LANES == 0 and R > SHORT * LANES:
        # A vector fills whole registers as rows of 128.
        x = _reduce_rows(x.reshape(1, R // LANES, LANES), how, lambda total: total, how.dtype, config)
        R = LANES
    return _reduce_lanes(x.reshape(A, R), how, finish, dtype, config)


def _reduce_lanes(x: jax.Array, how: combine.Reduction, finish: Any, dtype: Any, config: ReduceConfig) -> jax.Array:
    """Reduces [A, R] over R."""
    A, R = x.shape
    # Results lie along lanes where there are enough of them, and otherwise, one by one, along sublanes.
    across = A >= LANES
    r = min(config.block_r, round_up(R, LANES))
    a = min(round_up(A, LANES), max(LANES, config.block_size // r // LANES * LANES)) if across else A
    steps = pl.cdiv(R, r)
    return pl.pallas_call(
        functools.partial(
            _lanes_kernel, how=how, finish=finish, length=R, steps=steps, across=across, join_rows=config.join_rows
        ),
        grid=(pl.cdiv(A, a), steps),
        in_specs=[pl.BlockSpec((a, r), lambda i, k: (i, k))],
        out_specs=pl.BlockSpec((1, a), lambda i, k: (0, i)) if across else pl.BlockSpec((a, 1), lambda i, k: (i, 0)),
        out_shape=_like(x, (1, A) if across else (A, 1), dtype),
        scratch_shapes=[pltpu.VMEM((a, LANES), how.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=config.vmem_limit_bytes
        ),
        name="reduce_lanes",
    )(x)


def _lanes_kernel(
    x_ref: Any,
    out_ref: Any,
    acc_ref: Any,
    *,
    how: combine.Reduction,
    finish: Any,
    length: int,
    steps: int,
    across: bool,
    join_rows: int,
) -> None:
    step = pl.program_id(1)
    a, r = x_ref.shape

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.full(acc_ref.shape, how.identity, how.dtype)

    # Lane by lane, one slice of the block after the other, for as many rows as registers hold.
    rows = min(a, LANES)

    def add_rows(number: Any, _: Any) -> None:
        at = pl.ds(number * rows, rows)
        total = acc_ref[at, :]
        for start in range(0, r, LANES):
            part = x_ref[at, start : start + LANES].astype(how.dtype)
            if length % r:
                part = how.mask(part, 1, length - start - step * r)
            total = how.join(total, part)
        acc_ref[at, :] = total

    lax.fori_loop(0, a // rows, add_rows, None)

    @pl.when(step == steps - 1)
    def _():
        if not across:
            out_ref[...] = finish(how.over_axis(acc_ref[...], 1))
            return
        some = join_rows if a % join_rows == 0 else LANES

        def join_lanes(number: Any, _: Any) -> None:
            at = pl.ds(pl.multiple_of(number * some, some), some)
            out_ref[:, at] = finish(how.over_axis(acc_ref[at, :].T, 0))

        lax.fori_loop(0, a // some, join_lanes, None)


def _reduce_rows(x: jax.Array, how: combine.Reduction, finish: Any, dtype: Any, config: ReduceConfig) -> jax.Array:
    """Reduces [A, R, B] over R, adding up rows of registers."""
    A, R, B = x.shape
    chunk = min(CHUNK, round_up(R, PACKED_ROWS))
    r, b = min(config.block_r // chunk * chunk, round_up(R, chunk)), min(config.block_b, B)
    a = min(A, max(1, config.block_size // (r * round_up(b, LANES))))
    steps = pl.cdiv(R, r)
    out = pl.pallas_call(
        functools.partial(
            _rows_kernel, how=how, finish=finish, length=R, steps=steps, chunk=chunk, strip=config.strip_lanes
        ),
        grid=(pl.cdiv(A, a), pl.cdiv(B, b), steps),
        in_specs=[pl.BlockSpec((a, r, b), lambda i, j, k: (i, k, j))],
        out_specs=pl.BlockSpec((a, 1, b), lambda i, j, k: (i, 0, j)),
        out_shape=_like(x, (A, 1, B), dtype),
        scratch_shapes=[pltpu.VMEM((a, SUBLANES, b), how.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=config.vmem_limit_bytes
        ),
        name="reduce_rows",
    )(x)
    return out.reshape(A, B)


def _rows_kernel(
    x_ref: Any,
    out_ref: Any,
    acc_ref: Any,
    *,
    how: combine.Reduction,
    finish: Any,
    length: int,
    steps: int,
    chunk: int,
    strip: int,
) -> None:
    step = pl.program_id(2)
    a, r, b = x_ref.shape
    strips = [pl.ds(start, min(strip, b - start)) for start in range(0, b, strip)]

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.full(acc_ref.shape, how.identity, how.dtype)

    def one(i: Any, lanes: Any) -> None:
        def add_chunk(number: Any, total: jax.Array) -> jax.Array:
            start = pl.multiple_of(number * chunk, chunk)
            for row in range(0, chunk, PACKED_ROWS):
                block = x_ref[i, pl.ds(start + row, PACKED_ROWS), lanes].astype(how.dtype)
                for at in range(0, PACKED_ROWS, SUBLANES):
                    part = block[at : at + SUBLANES]
                    if length % r:
                        part = how.mask(part, 0, length - step * r - start - row - at)
                    total = how.join(total, part)
            return total

        # As many sums as registers hold, over all rows of the block, before the next ones.
        acc_ref[i, :, lanes] = lax.fori_loop(0, r // chunk, add_chunk, acc_ref[i, :, lanes])

    def over_a(visit: Any) -> None:
        for lanes in strips:
            lax.fori_loop(0, a, lambda i, _, lanes=lanes: visit(i, lanes), None)

    over_a(one)

    @pl.when(step == steps - 1)
    def _():
        def last(i: Any, lanes: Any) -> None:
            out_ref[i, :, lanes] = finish(how.over_axis(acc_ref[i, :, lanes], 0))

        over_a(last)


def _reduce_short(x: jax.Array, how: combine.Reduction, finish: Any, dtype: Any, config: ReduceConfig) -> jax.Array:
    """Reduces [A, R, B] over an R of a few rows, for many elements of A at once."""
    A, R, B = x.shape
    b = min(config.block_b, B)
    # A block of few rows has room for whole registers of 8.
    most = max(SUBLANES, config.block_size // (round_up(R, SUBLANES) * round_up(b, LANES)) // SUBLANES * SUBLANES)
    a = min(most, round_up(A, SUBLANES)) if A > SUBLANES else A
    return pl.pallas_call(
        functools.partial(_short_kernel, how=how, finish=finish, strip=config.strip_lanes),
        grid=(pl.cdiv(A, a), pl.cdiv(B, b)),
        in_specs=[pl.BlockSpec((a, R, b), lambda i, j: (i, 0, j))],
        out_specs=pl.BlockSpec((a, b), lambda i, j: (i, j)),
        out_shape=_like(x, (A, B), dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=config.vmem_limit_bytes
        ),
        name="reduce_short",
    )(x)


def _short_kernel(x_ref: Any, out_ref: Any, *, how: combine.Reduction, finish: Any, strip: int) -> None:
    a, _, b = x_ref.shape
    some = min(a, SUBLANES)
    for start in range(0, b, strip):
        lanes = pl.ds(start, min(strip, b - start))

        def reduce_some(number: Any, _: Any, lanes: Any = lanes) -> None:
            at = pl.ds(pl.multiple_of(number * some, some), some)
            out_ref[at, lanes] = finish(how.over_axis(x_ref[at, :, lanes].astype(how.dtype), 1, keep=False))

        lax.fori_loop(0, a // some, reduce_some, None)


def _like(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An output that varies over the axes of a `shard_map` that the input varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


def _finish(total: jax.Array, *, params: ReduceParams, length: int) -> jax.Array:
    """The output of a total: divided for a mean, rounded once."""
    if params.kind == "mean":
        total = total / np.float32(length)
    return total.astype(params.dtype)

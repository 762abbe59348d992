"""`reduce` as a portable Pallas kernel.

The grid runs over blocks of the kept axes and, innermost, of the reduced ones. For one reduced axis R:

    x [A, R, B] ──► block [a, r, b] ──► partial [a, b] ──► accumulator [a, b] ──► out [A, B]
                    masked past R        one reduction      across blocks of R     after the last one
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.config import Config
from opmux.core.ops.dense import accumulator
from opmux.core.ops.reduce import ReduceParams, reduced_axes
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.interpret.dense_config import ReduceConfig, trailing_blocks
from opmux.plugins.interpret.leading_batch import leading_batch

# The dtype is repeated because jnp would widen short integers.
_REDUCERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum": lambda block: jnp.sum(block, axis=reduced_axes(block.ndim), dtype=block.dtype),
    "prod": lambda block: jnp.prod(block, axis=reduced_axes(block.ndim), dtype=block.dtype),
    "max": lambda block: jnp.max(block, axis=reduced_axes(block.ndim)),
    "min": lambda block: jnp.min(block, axis=reduced_axes(block.ndim)),
}
_COMBINERS = {"sum": jnp.add, "prod": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum}


def reduce(request: Request, operands: Operands, config: Config) -> Outputs:
    """Reduces the odd axes, keeping partial results of their blocks in an accumulator.

    Args:
      request: a request of `reduce`.
      operands: `x`, [A, R, B] or with more pairs of a reduced and a kept axis.
      config: a `ReduceConfig`.
    """
    x = operands["x"]
    rank = x.ndim

    def run(x: jax.Array) -> jax.Array:
        # A batch of reductions is one reduction with a longer first axis.
        batch, one = x.shape[: x.ndim - rank], x.shape[x.ndim - rank :]
        out = _reduce(x.reshape(math.prod(batch) * one[0], *one[1:]), request.params, cast(ReduceConfig, config))
        return out.reshape(*batch, *one[::2])

    return {"out": leading_batch(run)(x)}


def _reduce(x: jax.Array, params: ReduceParams, config: ReduceConfig) -> jax.Array:
    kept, reduced = x.shape[::2], x.shape[1::2]
    acc = accumulator(params.acc)
    kind = "sum" if params.kind == "mean" else params.kind
    if acc.kind == "b":
        kind = {"sum": "max", "prod": "min"}.get(kind, kind)
    finish = functools.partial(_finish, params=params, acc=acc, count=math.prod(reduced))
    if not x.size:
        # Pallas has no grid over nothing; and nothing reduces to the identity.
        return finish(jnp.full(kept, _identity(kind, acc), acc))

    kept_block = trailing_blocks(kept, config.block_kept)
    reduced_block = trailing_blocks(reduced, config.block_reduced)
    steps = tuple(map(pl.cdiv, reduced, reduced_block))
    return pl.pallas_call(
        functools.partial(_reduce_kernel, kind=kind, acc=acc, lengths=reduced, steps=steps, finish=finish),
        grid=(*map(pl.cdiv, kept, kept_block), *steps),
        in_specs=[
            pl.BlockSpec(
                _take_turns(kept_block, reduced_block), lambda *at: _take_turns(at[: len(kept)], at[len(kept) :])
            )
        ],
        out_specs=pl.BlockSpec(kept_block, lambda *at: at[: len(kept)]),
        out_shape=jax.ShapeDtypeStruct(kept, params.dtype),
        scratch_shapes=[pl.MemorySpace.ANY(kept_block, acc)] if math.prod(steps) > 1 else [],
        interpret=True,
        name="reduce",
    )(x)


def _take_turns(kept: tuple[Any, ...], reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    pairs = zip(kept, (*reduced, None), strict=True)
    return tuple(value for pair in pairs for value in pair)[:-1]


def _reduce_kernel(
    x_ref: Any,
    out_ref: Any,
    *scratch: Any,
    kind: str,
    acc: np.dtype[Any],
    lengths: tuple[int, ...],
    steps: tuple[int, ...],
    finish: Callable[[jax.Array], jax.Array],
) -> None:
    at = [pl.program_id(len(out_ref.shape) + number) for number in range(len(steps))]

    # Load one block. Past the end of a reduced axis it holds whatever was there, which must not join.
    block = x_ref[...].astype(acc)
    for axis, step, length in zip(reduced_axes(block.ndim), at, lengths, strict=True):
        if length % block.shape[axis]:
            place = step * block.shape[axis] + lax.broadcasted_iota(jnp.int32, block.shape, axis)
            block = jnp.where(place < length, block, _identity(kind, acc))

    # Reduce it.
    partial = _REDUCERS[kind](block)
    if math.prod(steps) == 1:
        out_ref[...] = finish(partial)
        return

    # Join the blocks before it.
    (acc_ref,) = scratch

    @pl.when(functools.reduce(jnp.logical_and, [step == 0 for step in at]))
    def _():
        acc_ref[...] = jnp.full(acc_ref.shape, _identity(kind, acc), acc)

    acc_ref[...] = _COMBINERS[kind](acc_ref[...], partial)

    @pl.when(functools.reduce(jnp.logical_and, [step == last - 1 for step, last in zip(at, steps, strict=True)]))
    def _():
        out_ref[...] = finish(acc_ref[...])


def _finish(total: jax.Array, *, params: ReduceParams, acc: np.dtype[Any], count: int) -> jax.Array:
    """The output of a total: divided for a mean, rounded once."""
    if params.kind == "mean":
        # `lax.div` divides integers as `jnp.mean` does when it is asked for an integer dtype.
        total = lax.div(total, jnp.full(total.shape, count, acc))
    return total.astype(params.dtype)


def _identity(kind: str, acc: np.dtype[Any]) -> Any:
    """What joins a reduction without changing it."""
    if kind in ("sum", "prod"):
        return np.asarray(kind == "prod", acc)
    lowest = kind == "max"
    if acc.kind == "b":
        return np.asarray(not lowest)
    if jnp.issubdtype(acc, jnp.integer):
        return np.asarray(jnp.iinfo(acc).min if lowest else jnp.iinfo(acc).max, acc)
    return np.asarray(-np.inf if lowest else np.inf, acc)

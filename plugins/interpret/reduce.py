"""`reduce` as a portable Pallas kernel.

The grid runs over blocks of A, B and, innermost, of the reduced axis R:

    x [A, R, B] ──► block [a, r, b] ──► partial [a, b] ──► accumulator [a, b] ──► out [A, B]
                    masked past R        one reduction      across blocks of R     after the last one
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.config import Config
from opmux.core.ops.dense import accumulator
from opmux.core.ops.reduce import ReduceParams
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.interpret.dense_config import ReduceConfig, even_block

# The dtype is repeated because jnp would widen short integers.
_REDUCERS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "sum": lambda block: jnp.sum(block, axis=1, dtype=block.dtype),
    "prod": lambda block: jnp.prod(block, axis=1, dtype=block.dtype),
    "max": lambda block: jnp.max(block, axis=1),
    "min": lambda block: jnp.min(block, axis=1),
}
_COMBINERS = {"sum": jnp.add, "prod": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum}


def reduce(request: Request, operands: Operands, config: Config) -> Outputs:
    """Reduces the middle axis, keeping partial results of its blocks in an accumulator.

    Args:
      request: a request of `reduce`.
      operands: `x`, [A, R, B].
      config: a `ReduceConfig`.
    """
    params: ReduceParams = request.params
    x = operands["x"]
    A, R, B = x.shape
    acc = accumulator(params.acc)
    kind = "sum" if params.kind == "mean" else params.kind
    if acc.kind == "b":
        kind = {"sum": "max", "prod": "min"}.get(kind, kind)
    finish = functools.partial(_finish, params=params, acc=acc, length=R)
    if not x.size:
        # Pallas has no grid over nothing; and nothing reduces to the identity.
        return {"out": finish(jnp.full((A, B), _identity(kind, acc), acc))}

    config = cast(ReduceConfig, config)
    a, r, b = even_block(A, config.block_a), even_block(R, config.block_r), even_block(B, config.block_b)
    steps = pl.cdiv(R, r)
    out = pl.pallas_call(
        functools.partial(_reduce_kernel, kind=kind, acc=acc, length=R, steps=steps, finish=finish),
        grid=(pl.cdiv(A, a), pl.cdiv(B, b), steps),
        in_specs=[pl.BlockSpec((a, r, b), lambda i, j, k: (i, k, j))],
        out_specs=pl.BlockSpec((a, b), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((A, B), params.dtype),
        scratch_shapes=[pl.MemorySpace.ANY((a, b), acc)] if steps > 1 else [],
        interpret=True,
        name="reduce",
    )(x)
    return {"out": out}


def _reduce_kernel(
    x_ref: Any, out_ref: Any, *scratch: Any, kind: str, acc: np.dtype[Any], length: int, steps: int, finish: Any
) -> None:
    a, r, b = x_ref.shape
    step = pl.program_id(2)

    # Load one block. Past the end of R it holds whatever was there, which must not join.
    block = x_ref[...].astype(acc)
    if length % r:
        row = step * r + lax.broadcasted_iota(jnp.int32, (a, r, b), 1)
        block = jnp.where(row < length, block, _identity(kind, acc))

    # Reduce it.
    partial = _REDUCERS[kind](block)
    if steps == 1:
        out_ref[...] = finish(partial)
        return

    # Join the blocks before it.
    (acc_ref,) = scratch

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.full((a, b), _identity(kind, acc), acc)

    acc_ref[...] = _COMBINERS[kind](acc_ref[...], partial)

    @pl.when(step == steps - 1)
    def _():
        out_ref[...] = finish(acc_ref[...])


def _finish(total: jax.Array, *, params: ReduceParams, acc: np.dtype[Any], length: int) -> jax.Array:
    """The output of a total: divided for a mean, rounded once."""
    if params.kind == "mean":
        # `lax.div` divides integers as `jnp.mean` does when it is asked for an integer dtype.
        total = lax.div(total, jnp.full(total.shape, length, acc))
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

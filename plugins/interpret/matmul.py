"""`matmul` and its backward as a portable Pallas kernel.

The grid runs over blocks of the batch axes, of M, of N and, innermost, of K:

    a [*b, m, k] ┐
                 ├─► partial [*b, m, n] ──► accumulator [*b, m, n] ──► out [*B, M, N]
    b [*b, k, n] ┘   one product            across blocks of K         after the last one

A batch axis that an operand is broadcast along stays of length 1: its index map keeps pointing at block 0.
The backward is two more products through the same kernel. Where an operand was broadcast, the sum over that
batch axis joins the sum of the product, so no cotangent is larger than its operand.
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

from opmux.core.config import Config
from opmux.core.ops.dense import accumulator
from opmux.core.ops.matmul import MatmulParams, Precision, dot, outputs, sum_dtype
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.interpret.dense_config import MatmulConfig, even_block, trailing_blocks
from opmux.plugins.interpret.leading_batch import leading_batch


def matmul(request: Request, operands: Operands, config: Config) -> Outputs:
    """Multiplies block by block.

    Args:
      request: a request of `matmul`.
      operands: `a`, [*Ba, M, K], and `b`, [*Bb, K, N], with batch axes of equal length or 1.
      config: a `MatmulConfig`.
    """
    out = outputs(request)["out"]
    return {"out": _product(operands["a"], operands["b"], out.dtype, request.params, cast(MatmulConfig, config))}


def matmul_vjp(request: Request, operands: Operands, config: Config) -> Outputs:
    """Cotangents of `a` and `b`: `d_out bT` and `aT d_out`.

    Args:
      request: a request of `matmul_vjp`.
      operands: `a` and `b` as in `matmul`, and `d_out`, [*B, M, N].
      config: a `MatmulConfig`.
    """
    a, b, d_out = operands["a"], operands["b"], operands["d_out"]
    multiply = functools.partial(_product, params=request.params, config=cast(MatmulConfig, config))
    cotangents: Outputs = {}
    if "a" in request.wanted:
        over = _broadcast_axes(a, d_out)
        cotangents["a"] = multiply(_fold(d_out, over, -1), _fold(b, over, -1), a.dtype, b_transposed=True)
    if "b" in request.wanted:
        over = _broadcast_axes(b, d_out)
        cotangents["b"] = multiply(_fold(a, over, -2), _fold(d_out, over, -2), b.dtype, a_transposed=True)
    return cotangents


def _broadcast_axes(operand: jax.Array, out: jax.Array) -> list[int]:
    """Batch axes along which an operand was broadcast."""
    return [axis for axis in range(out.ndim - 2) if operand.shape[axis] != out.shape[axis]]


def _fold(x: jax.Array, axes: list[int], into: int) -> jax.Array:
    """Merges batch axes into one of the last two axes, leaving axes of length 1 in their places."""
    if not axes:
        return x
    batch = [axis for axis in range(x.ndim - 2) if axis not in axes]
    order = [*batch, *axes, x.ndim - 2, x.ndim - 1] if into == -2 else [*batch, x.ndim - 2, *axes, x.ndim - 1]
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
    shape[into] *= math.prod(x.shape[axis] for axis in axes)
    return lax.transpose(x, order).reshape(shape)


def _product(
    a: jax.Array,
    b: jax.Array,
    dtype: Any,
    params: MatmulParams,
    config: MatmulConfig,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
) -> jax.Array:
    """The product of [*Ba, M, K] and [*Bb, K, N] in `dtype`; a transposed operand has its last two axes swapped."""
    run = functools.partial(
        _blocked_product,
        dtype=np.dtype(dtype),
        params=params,
        config=config,
        a_transposed=a_transposed,
        b_transposed=b_transposed,
    )
    return leading_batch(run)(a, b)


def _blocked_product(
    a: jax.Array,
    b: jax.Array,
    *,
    dtype: np.dtype[Any],
    params: MatmulParams,
    config: MatmulConfig,
    a_transposed: bool,
    b_transposed: bool,
) -> jax.Array:
    # Blocks are transposed in the kernel: outside of it XLA would choose a product before it knows of the transpose.
    M, K = a.shape[-2:][:: -1 if a_transposed else 1]
    N = b.shape[-2 if b_transposed else -1]
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, M, N)
    if 0 in (*shape, K):
        # Pallas has no grid over nothing; a sum of no terms is 0.
        return jnp.zeros(shape, dtype)
    common = jnp.promote_types(a.dtype, b.dtype)
    a, b = a.astype(common), b.astype(common)
    m, n, k = even_block(M, config.block_m), even_block(N, config.block_n), even_block(K, config.block_k)
    blocks = trailing_blocks(batch, config.block_batch)
    steps = pl.cdiv(K, k)
    acc = sum_dtype(dtype)
    if jnp.issubdtype(common, jnp.inexact) and (steps > 1 or common != acc):
        # One product in 16 bits is rounded once, by XLA. Several need a wider sum between them.
        acc = np.dtype(jnp.promote_types(accumulator(acc), accumulator(np.dtype(common))))

    def spec(sizes: tuple[int, ...], last: tuple[int, int], place: Any, swap: bool = False) -> pl.BlockSpec:
        turn = -1 if swap else 1
        whole = [size == full for size, full in zip(sizes, batch, strict=True)]
        block = tuple(length if kept else 1 for length, kept in zip(blocks, whole, strict=True))

        def index(*at: Any) -> Any:
            leading = (number if kept else 0 for number, kept in zip(at, whole, strict=False))
            return (*leading, *place(*at[-3:])[::turn])

        return pl.BlockSpec((*block, *last[::turn]), index)

    return pl.pallas_call(
        functools.partial(
            _matmul_kernel,
            transposed=(a_transposed, b_transposed),
            precision=params.precision,
            acc=acc,
            length=K,
            steps=steps,
        ),
        grid=(*map(pl.cdiv, batch, blocks), pl.cdiv(M, m), pl.cdiv(N, n), steps),
        in_specs=[
            spec(a.shape[:-2], (m, k), lambda i, j, s: (i, s), a_transposed),
            spec(b.shape[:-2], (k, n), lambda i, j, s: (s, j), b_transposed),
        ],
        out_specs=spec(batch, (m, n), lambda i, j, s: (i, j)),
        out_shape=jax.ShapeDtypeStruct(shape, dtype),
        scratch_shapes=[pl.MemorySpace.ANY((*blocks, m, n), acc)] if steps > 1 else [],
        interpret=True,
        name="matmul",
    )(a, b)


def _matmul_kernel(
    a_ref: Any,
    b_ref: Any,
    out_ref: Any,
    *scratch: Any,
    transposed: tuple[bool, bool],
    precision: Precision,
    acc: np.dtype[Any],
    length: int,
    steps: int,
) -> None:
    step = pl.program_id(len(out_ref.shape))

    # Load one block of each operand. Past the end of K they hold whatever was there, which must not join.
    a, b = (ref[...].mT if swap else ref[...] for ref, swap in zip((a_ref, b_ref), transposed, strict=True))
    k = a.shape[-1]
    if length % k:
        a = jnp.where(step * k + lax.broadcasted_iota(jnp.int32, a.shape, a.ndim - 1) < length, a, 0)
        b = jnp.where(step * k + lax.broadcasted_iota(jnp.int32, b.shape, b.ndim - 2) < length, b, 0)

    # Multiply them. XLA's CPU backend lacks some 16-bit products with a float32 result, which it would convert anyway.
    if jnp.issubdtype(a.dtype, jnp.inexact):
        a, b = a.astype(acc), b.astype(acc)
    partial = dot(a, b, precision, acc)
    if steps == 1:
        out_ref[...] = partial.astype(out_ref.dtype)
        return

    # Join the blocks before them.
    (acc_ref,) = scratch

    @pl.when(step == 0)
    def _():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    acc_ref[...] += partial

    @pl.when(step == steps - 1)
    def _():
        out_ref[...] = acc_ref[...].astype(out_ref.dtype)

"""The one seam between compiled and simulated kernels: a product of a warpgroup, by `wgmma`.

A compiled product reads B, and A unless it is in registers, from shared memory, and adds to registers. JAX's
simulators have no operand in registers and no accumulator that starts from a value, and that of JAX 0.10.2 has no
transposed operand. There the product is made of values; where the simulator has `wgmma`, it is used, so that
accesses to shared memory are checked as those of `wgmma`. All else of a kernel is the same code in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.core import compat
from opmux.plugins.mosaic_gpu.pallas import for_each

_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def dot(
    a: Any, b: Any, acc: jax.Array | None = None, *, transpose_a: bool = False, transpose_b: bool = False,
    after: Callable[[], None] | None = None,
) -> jax.Array:  # fmt: skip
    """The product `a b`, added to `acc` if that is given; it has ended when this returns.

    Args:
      a: [M, K], in shared memory or in registers; M is a multiple of 64, and K of a swizzled line of shared memory.
      b: [K, N], in shared memory; N is a multiple of 8 and at most 256.
      acc: [M, N], in registers; float32, or int32 for operands of int8.
      transpose_a: `a` is [K, M], in shared memory; elements of 16 bits only.
      transpose_b: `b` is [N, K]; elements of 16 bits, or of any size where the other operand lies along K too.
      after: what to do while the product is under way, such as waiting for the next operands or waking the other
        warpgroup; it must not give back an operand.

    Returns:
      [M, N], in registers.
    """
    if not compat.in_gpu_simulator():
        return _compiled(a, b, acc, transpose_a, transpose_b, after)
    transposes = transpose_a or transpose_b
    if isinstance(a, jax.Array) or (transposes and not compat.gpu_simulator_transposes()):
        return _of_values(a, b, acc, transpose_a, transpose_b, after)
    product = _compiled(a, b, None, transpose_a, transpose_b, after)
    return product if acc is None else acc + product


def sum_of_dots(
    steps: int, operands: Callable[[Any], tuple[Any, Any]], release: Callable[[Any], None], *, shape: tuple[int, int],
    dtype: Any, acc: jax.Array | None = None, transpose_a: bool = False, transpose_b: bool = False,
) -> jax.Array:  # fmt: skip
    """The sum of the products `a b` of all steps, one of them under way while the next one is issued.

    Args:
      steps: how many products; at least one.
      operands: gives `a` and `b` of a step, both in shared memory, when they have arrived there.
      release: hands back the operands of a step, whose product has ended.
      shape: [M, N] of the result.
      dtype: of the operands.
      acc: [M, N] in registers, to which the products are added.
      transpose_a, transpose_b: as in `dot`.

    Returns:
      [M, N] in registers.
    """
    simulated = compat.in_gpu_simulator()
    if simulated and (transpose_a or transpose_b) and not compat.gpu_simulator_transposes():

        def join(step: Any, total: jax.Array) -> jax.Array:
            total = _of_values(*operands(step), total, transpose_a, transpose_b, None)
            release(step)
            return total

        return lax.fori_loop(0, steps, join, jnp.zeros(shape, acc_dtype(dtype)) if acc is None else acc)

    def issue_all(acc_ref: Any) -> None:
        def issue(step: Any) -> None:
            a, b = operands(step)
            plgpu.wgmma(acc_ref, transposed(a, transpose_a), transposed(b, transpose_b))
            plgpu.wgmma_wait(1)  # all but the one just issued have ended
            pl.when(step > 0)(lambda: release(step - 1))

        for_each(0, steps, issue)

    def product(acc_ref: Any) -> jax.Array:
        issue_all(acc_ref)
        return acc_ref[...]

    if acc is None or simulated:
        total = pl.run_scoped(product, _ACC(shape, acc_dtype(dtype)))
        total = total if acc is None else acc + total
    else:
        total = pl.run_state(issue_all)(_ACC.init(acc))
    release(steps - 1)
    return total


def transposed(ref: Any, swap: bool = True) -> Any:
    """A view of a matrix in shared memory with its axes swapped, if they are to be."""
    return ref.transpose((1, 0)) if swap else ref


def acc_dtype(dtype: Any) -> np.dtype[Any]:
    """What `wgmma` sums products of a dtype in."""
    return np.dtype(np.int32 if jnp.issubdtype(dtype, jnp.integer) else np.float32)


def _compiled(
    a: Any, b: Any, acc: jax.Array | None, transpose_a: bool, transpose_b: bool, after: Callable[[], None] | None
) -> jax.Array:
    a, b = transposed(a, transpose_a), transposed(b, transpose_b)

    def issue(acc_ref: Any) -> None:
        plgpu.wgmma(acc_ref, a, b)
        if after is not None:
            after()

    if acc is not None:
        return pl.run_state(issue)(_ACC.init(acc))

    def product(acc_ref: Any) -> jax.Array:
        issue(acc_ref)
        return acc_ref[...]

    return pl.run_scoped(product, _ACC((a.shape[0], b.shape[1]), acc_dtype(b.dtype)))


def _of_values(
    a: Any, b: Any, acc: jax.Array | None, transpose_a: bool, transpose_b: bool, after: Callable[[], None] | None
) -> jax.Array:
    dtype = acc_dtype(b.dtype)
    left, right = a[...].astype(dtype), b[...].astype(dtype)
    plgpu.commit_smem()  # reads of values have to be ordered before the next copy; those of wgmma are
    product = jnp.dot(
        left.T if transpose_a else left, right.T if transpose_b else right,
        precision=lax.Precision.HIGHEST, preferred_element_type=dtype,
    )  # fmt: skip
    if after is not None:
        after()
    return product if acc is None else acc + product

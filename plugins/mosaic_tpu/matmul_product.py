"""The kernel of products, for `matmul` and both of its cotangents.

    left [*Bl, P, R] ──► block [p, r] ─┐
                                       ├─► matrix unit ──► acc [p, q] float32 ──► out block [p, q] ──► out [*B, P, Q]
    right [*Br, R, Q] ─► block [r, q] ─┘    one product     over terms and         rounded once
                                                            summed batch axes
The first product is stored, the next ones are added, and the last one goes to the result by way of registers; a sum
that has one product only needs no accumulator. What lies past the end of the terms in the last block is not read.
A transposed factor is transposed on its way into the matrix unit.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core import compat
from opmux.plugins.mosaic_tpu.matmul_blocks import Plan, plan

@dataclass(frozen=True, kw_only=True)
class Product:
    """What is computed, and in which blocks.

    Attributes:
      batch: batch axes of the result, as long as those of the longer factor, or 1 where they are summed over.
      dtype: of the result.
      precision: of float32 products.
      most: rows, columns and terms of a block, at most.
      vmem_limit_bytes: vector memory that the kernel may use; None for what the blocks need.
      left_transposed, right_transposed: the factor has its last two axes swapped.
      chunk: columns and terms of the right factor that are multiplied at a time. Up to 1024 products of int8 have a
        sum that is exact in float32.
      int8_unit: int8 is multiplied as it is; otherwise as bfloat16, which is exact.
      name: of the kernel.
    """

    batch: tuple[int, ...]
    dtype: np.dtype[Any]
    precision: lax.Precision | None
    most: tuple[int, int, int]
    vmem_limit_bytes: int | None = None
    left_transposed: bool = False
    right_transposed: bool = False
    chunk: int = 256
    int8_unit: bool = True
    name: str = "matmul"

    def __call__(self, left: jax.Array, right: jax.Array) -> jax.Array:
        """The product of [*Bl, P, R] and [*Br, R, Q], none of which is empty."""
        left, right = compat.vary_like(left, [right]), compat.vary_like(right, [left])
        where = plan(
            left.shape,
            right.shape,
            self.batch,
            self.most,
            left_transposed=self.left_transposed,
            right_transposed=self.right_transposed,
            itemsize=min(left.dtype.itemsize, self.dtype.itemsize),
        )
        common = np.dtype(jnp.promote_types(left.dtype, right.dtype))
        acc = np.dtype(np.int32 if common.kind == self.dtype.kind == "i" else np.float32)
        needed = where.vmem_bytes(left.dtype.itemsize, right.dtype.itemsize, self.dtype.itemsize)
        block = tuple(size for size in where.out.block if size is not None)
        return pl.pallas_call(
            functools.partial(_product_kernel, where=where, what=self, common=common, acc=acc),
            grid=where.grid,
            in_specs=[pl.BlockSpec(each.block, each.index) for each in (where.left, where.right)],
            out_specs=pl.BlockSpec(where.out.block, where.out.index),
            out_shape=jax.ShapeDtypeStruct(
                where.out.shape, self.dtype, manual_axis_type=jax.typeof(left).manual_axis_type
            ),
            scratch_shapes=[pltpu.VMEM(block, acc)] if where.accumulates(self.chunk) else [],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * where.parallel + ("arbitrary",) * len(where.sums),
                vmem_limit_bytes=self.vmem_limit_bytes or needed + needed // 4 + 2**22,
                # `plan` gives no block that begins past the end of its array, and the kernel reads whole blocks.
                disable_bounds_checks=True,
            ),
            name=self.name,
        )(left, right)


def _product_kernel(
    left_ref: Any, right_ref: Any, out_ref: Any, *scratch: Any, where: Plan, what: Product, common: Any, acc: Any
) -> None:
    refs = (left_ref, right_ref, out_ref, scratch[0] if scratch else None)
    multiply = functools.partial(_multiply, *refs, what=what, common=common, acc=acc)
    count = math.prod(where.sums)
    if count == 1:
        multiply(where.terms, first=True, last=True)
        return
    at = [pl.program_id(where.parallel + axis) for axis in range(len(where.sums))]
    number = functools.reduce(lambda number, axis: number * where.sums[axis] + at[axis], range(1, len(at)), at[0])
    between = (number > 0) & (number < count - 1)

    # The first block along the terms is full where there are several.
    pl.when(number == 0)(lambda: multiply(where.terms, first=True))
    if where.tail and len(at) > 1:
        final = at[-1] == where.sums[-1] - 1
        pl.when(between & final)(lambda: multiply(where.tail))
        between &= ~final
    if count > 2:
        pl.when(between)(lambda: multiply(where.terms))
    pl.when(number == count - 1)(lambda: multiply(where.tail or where.terms, last=True))


def _multiply(
    left_ref: Any,
    right_ref: Any,
    out_ref: Any,
    acc_ref: Any,
    terms: int,
    *,
    what: Product,
    common: Any,
    acc: Any,
    first: bool = False,
    last: bool = False,
) -> None:
    """Adds the product of the first terms of two blocks, as much at a time as the matrix units hold of the right one."""
    q = out_ref.shape[-1]
    for column in range(0, q, what.chunk):
        columns = pl.ds(column, min(what.chunk, q - column))
        for term in range(0, terms, what.chunk):
            some = pl.ds(term, min(what.chunk, terms - term))
            left = left_ref[some, :] if what.left_transposed else left_ref[:, some]
            right = right_ref[columns, some] if what.right_transposed else right_ref[some, columns]
            total = _dot(_factor(left, common, acc, what), _factor(right, common, acc, what), what, acc)
            if not (first and term == 0):
                total = acc_ref[:, columns] + total
            if last and term + what.chunk >= terms:
                out_ref[:, columns] = total.astype(out_ref.dtype)
            else:
                acc_ref[:, columns] = total


def _dot(left: jax.Array, right: jax.Array, what: Product, acc: Any) -> jax.Array:
    """A product of whole registers, summed exactly where it is one of integers."""
    contracted = ((int(not what.left_transposed),), (int(what.right_transposed),))
    return lax.dot_general(
        left,
        right,
        (contracted, ((), ())),
        precision=what.precision if left.dtype == np.float32 else None,
        preferred_element_type=np.int32 if left.dtype == np.int8 else np.float32,
    ).astype(acc)


def _factor(block: jax.Array, common: Any, acc: Any, what: Product) -> jax.Array:
    """A block as the matrix units take it: int8 as bfloat16 where they do not take it as it is, or floats are summed."""
    if common.kind == "i" and not (what.int8_unit and acc.kind == "i"):
        return block.astype(np.float32).astype(jnp.bfloat16)
    return block.astype(common)

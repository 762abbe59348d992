"""The kernel of products, for `matmul` and both of its cotangents.

    left [*Bl, P, R] ──► block [p, r] ──► pieces ─┐
                                                  ├─► matrix units ──► acc [p, q] ──► out block [p, q] ──► out
    right [*Br, R, Q] ─► block [r, q] ──► pieces ─┘   some columns     over terms     rounded once     [*B, P, Q]
                                                      and terms at     and summed
                                                      a time           batch axes

The first product is stored, the next ones are added, and the last one goes to the result by way of registers. What
lies past the end of the terms in the last block is not read. A transposed factor is transposed on its way into the
matrix units. These hold some columns and terms of the right factor while all rows of the left one pass: so the sum
lies in vector memory, and no registers are spilled whatever the blocks are. See `matmul_pieces` for the pieces.
"""

from __future__ import annotations

import functools
import itertools
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
from opmux.plugins.mosaic_tpu.matmul_pieces import count_pieces, products_of_pieces
from opmux.plugins.mosaic_tpu.matmul_split import split

TRANSPOSED_ROWS, TRANSPOSED_COLUMNS = 256, 512
"""Rows that are transposed in registers, and columns that they are multiplied by meanwhile.

More rows do not fit in registers; more columns need fewer transposes.
"""

_SPARE = 2 * 2**20
"""Vector memory beside the blocks, for what the compiler keeps there."""


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
      chunk: columns and terms of the right factor that are multiplied at a time.
      int8_unit: int8 is multiplied as it is; otherwise as bfloat16.
      name: of the kernel.
    """

    batch: tuple[int, ...]
    dtype: np.dtype[Any]
    precision: lax.Precision
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
        acc = np.dtype(np.int32 if left.dtype.kind == self.dtype.kind == "i" else np.float32)
        as_is = self.int8_unit and acc.kind == "i"
        pieces = count_pieces((left.dtype, right.dtype), self.precision, as_is)
        itemsizes = (left.dtype.itemsize, right.dtype.itemsize, self.dtype.itemsize)
        scratch = [
            pltpu.VMEM((number, *tile), jnp.bfloat16)
            for number, tile in zip(pieces, self._tiles_of_pieces(where), strict=True)
            if number
        ]
        if where.accumulates(self.chunk) or max(pieces) > 1:
            scratch.append(pltpu.VMEM(where.tile(where.out), acc))
        return pl.pallas_call(
            functools.partial(_product_kernel, where=where, what=self, pieces=pieces, acc=acc),
            grid=where.grid,
            in_specs=[pl.BlockSpec(each.block, each.index) for each in (where.left, where.right)],
            out_specs=pl.BlockSpec(where.out.block, where.out.index),
            out_shape=jax.ShapeDtypeStruct(
                where.out.shape, self.dtype, manual_axis_type=jax.typeof(left).manual_axis_type
            ),
            scratch_shapes=scratch,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * where.parallel + ("arbitrary",) * len(where.sums),
                vmem_limit_bytes=self.vmem_limit_bytes or where.vmem_bytes(itemsizes, pieces) + _SPARE,
                # `plan` gives no block that begins past the end of its array, and the kernel reads within blocks.
                disable_bounds_checks=True,
            ),
            name=self.name,
        )(left, right)

    def _tiles_of_pieces(self, where: Plan) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of pieces: those of a transposed left factor are not."""
        rows, columns = where.tile(where.left)
        return (columns, rows) if self.left_transposed else (rows, columns), where.tile(where.right)


def _product_kernel(
    left_ref: Any,
    right_ref: Any,
    out_ref: Any,
    *scratch: Any,
    where: Plan,
    what: Product,
    pieces: tuple[int, int],
    acc: np.dtype[Any],
) -> None:
    rest = list(scratch)
    left_refs = split(left_ref, rest.pop(0), what.left_transposed) if pieces[0] else [left_ref]
    right_refs = split(right_ref, rest.pop(0), False) if pieces[1] else [right_ref]
    multiply = functools.partial(
        _multiply,
        left_refs,
        right_refs,
        out_ref,
        rest[0] if rest else None,
        left_transposed=what.left_transposed and not pieces[0],
        right_transposed=what.right_transposed,
        chunk=what.chunk,
        acc=acc,
    )
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
    left_refs: list[Any],
    right_refs: list[Any],
    out_ref: Any,
    acc_ref: Any,
    terms: int,
    *,
    left_transposed: bool,
    right_transposed: bool,
    chunk: int,
    acc: np.dtype[Any],
    first: bool = False,
    last: bool = False,
) -> None:
    """Adds the product of the first terms of two blocks to the sum, or to the result."""
    p, q = out_ref.shape[-2:]
    # All rows pass through the units, unless registers have to hold them while they are transposed.
    some_rows, some_columns = (TRANSPOSED_ROWS, TRANSPOSED_COLUMNS) if left_transposed else (p, chunk)
    for row, column in itertools.product(range(0, p, some_rows), range(0, q, some_columns)):
        rows, columns = pl.ds(row, min(some_rows, p - row)), pl.ds(column, min(some_columns, q - column))
        parts = [
            (left_refs[left], right_refs[right], pl.ds(term, min(chunk, terms - term)))
            for term in range(0, terms, chunk)
            for left, right in products_of_pieces(len(left_refs), len(right_refs))
        ]
        for number, (left, right, some) in enumerate(parts):
            total = _dot(
                left[some, rows] if left_transposed else left[rows, some],
                right[columns, some] if right_transposed else right[some, columns],
                (int(not left_transposed), int(right_transposed)),
            )
            total = total.astype(acc)  # int8 that went through bfloat16 wraps as integers do
            if not (first and number == 0):
                total = acc_ref[rows, columns] + total
            if last and number == len(parts) - 1:
                out_ref[rows, columns] = total.astype(out_ref.dtype)
            else:
                acc_ref[rows, columns] = total


def _dot(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The product of two blocks over one axis of each, in float32, or int32 for int8."""
    return lax.dot_general(
        left,
        right,
        ((axes[:1], axes[1:]), ((), ())),
        precision=lax.Precision.DEFAULT,  # whatever `jax.default_matmul_precision` is: pieces are as precise as asked
        # Of up to 1024 products of int8 the sum is exact in float32 too.
        preferred_element_type=np.int32 if left.dtype == np.int8 else np.float32,
    )

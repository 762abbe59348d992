"""Where the kernel of products reads and writes: its grid and the blocks at each point of it. Imports no Pallas.

The grid runs over batch axes of the result, its rows, its columns, then batch axes that are summed over, and
innermost over the terms, so that one block of the result is finished before the next one is begun:

    for b in batch: for i in rows: for j in columns:          parallel
        for s in summed batch axes: for t in terms:           in order
            out[b, i, j] += left[b, s, i, t] · right[b, s, t, j]

A batch axis that a factor is broadcast along has one block, number 0, whichever point of the grid it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from opmux.plugins.mosaic_tpu.dense_config import LANES, SUBLANES, round_up

Shape = tuple[int, ...]
Index = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Operand:
    """Blocks of one array.

    Attributes:
      shape: of the array.
      block: of a block; None for an axis of which a block has one element.
      index: the number of the block along each axis at a point of the grid.
    """

    shape: Shape
    block: tuple[int | None, ...]
    index: Index


@dataclass(frozen=True)
class Plan:
    """The grid and the blocks of a product.

    Attributes:
      grid: its lengths.
      parallel: how many of its first axes may run in any order.
      left, right, out: blocks of the arrays.
      length: terms of the sum in one element of a batch that is summed over.
      terms: terms in one block.
    """

    grid: Shape
    parallel: int
    left: Operand
    right: Operand
    out: Operand
    length: int
    terms: int

    @property
    def sums(self) -> Shape:
        """Lengths of the axes of the grid along which one block of the result is accumulated."""
        return self.grid[self.parallel :]

    def accumulates(self, chunk: int) -> bool:
        """Whether a block of the result is the sum of several products, of at most `chunk` terms each."""
        return math.prod(self.sums) > 1 or self.terms > chunk

    @staticmethod
    def tile(operand: Operand) -> tuple[int, int]:
        """Rows and columns of a block."""
        rows, columns = (size for size in operand.block if size is not None)
        return rows, columns

    def vmem_bytes(self, itemsizes: tuple[int, int, int], pieces: tuple[int, int] = (0, 0)) -> int:
        """Vector memory of the blocks: two of each array, since one is copied while the other is used, and the sum.

        Args:
          itemsizes: bytes of an element of the left factor, of the right one and of the result.
          pieces: 16-bit copies of a block of the left and of the right factor.
        """
        arrays = (self.left, self.right, self.out)
        copied = sum(2 * tile_bytes(self.tile(each), size) for each, size in zip(arrays, itemsizes, strict=True))
        split = sum(count * tile_bytes(self.tile(each), 2) for each, count in zip(arrays, pieces, strict=False))
        return copied + split + tile_bytes(self.tile(self.out), 4)

    @property
    def tail(self) -> int:
        """Terms in the last block along the terms; 0 if it is full."""
        return self.length % self.terms


def plan(
    left: Shape,
    right: Shape,
    batch: Shape,
    most: tuple[int, int, int],
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
    itemsize: int = 4,
) -> Plan:
    """The plan of a product of [*Bl, P, R] and [*Br, R, Q].

    Args:
      left: shape of the left factor; a transposed one has its last two axes swapped.
      right: shape of the right factor.
      batch: batch axes of the result, 1 where batch elements are summed.
      most: rows, columns and terms of a block, at most.
      left_transposed: the left factor is [*Bl, R, P].
      right_transposed: the right factor is [*Br, Q, R].
      itemsize: bytes of an element of the narrowest array.
    """
    P, R = left[-2:][:: -1 if left_transposed else 1]
    Q = right[-2 if right_transposed else -1]
    p = block_length(P, most[0], LANES if left_transposed else packed_rows(itemsize))
    q = block_length(Q, most[1], LANES)
    r = block_length(R, most[2], LANES)
    full = tuple(map(max, left[:-2], right[:-2]))
    kept = [axis for axis, size in enumerate(batch) if size > 1]
    summed = [axis for axis, size in enumerate(batch) if size != full[axis]]
    grid = (*(full[axis] for axis in kept), -(-P // p), -(-Q // q), *(full[axis] for axis in summed), -(-R // r))
    i, j, t = len(kept), len(kept) + 1, len(grid) - 1
    place = {axis: number for number, axis in enumerate(kept)}
    place |= {axis: j + 1 + number for number, axis in enumerate(summed)}

    def operand(sizes: Shape, rows: tuple[int, int, int], columns: tuple[int, int, int]) -> Operand:
        moves = [place[axis] if size > 1 else None for axis, size in enumerate(sizes)]

        def index(*at: Any) -> tuple[Any, ...]:
            return (*(0 if number is None else at[number] for number in moves), at[rows[2]], at[columns[2]])

        return Operand((*sizes, rows[0], columns[0]), (*(None for _ in sizes), rows[1], columns[1]), index)

    along_p, along_q, along_r = (P, p, i), (Q, q, j), (R, r, t)
    return Plan(
        grid=grid,
        parallel=j + 1,
        left=operand(left[:-2], *((along_r, along_p) if left_transposed else (along_p, along_r))),
        right=operand(right[:-2], *((along_q, along_r) if right_transposed else (along_r, along_q))),
        out=operand(batch, along_p, along_q),
        length=R,
        terms=r,
    )


def block_length(size: int, most: int, multiple: int) -> int:
    """Length of blocks of about `most` elements: the whole axis, or a multiple."""
    return min(size, round_up(most, multiple))


def tile_bytes(tile: tuple[int, int], itemsize: int) -> int:
    """Bytes that rows and columns take in whole tiles of memory."""
    return round_up(tile[0], packed_rows(itemsize)) * round_up(tile[1], LANES) * itemsize


def packed_rows(itemsize: int) -> int:
    """Rows of a tile in memory: 8 registers' sublanes of 32 bits."""
    return SUBLANES * max(1, 4 // itemsize)

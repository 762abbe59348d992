"""How the tiles of a batched matrix product follow each other. Imports no Pallas.

Tiles go down in bands of `band` rows of tiles, so that those that run at one time need few rows of `a` and few
columns of `b`, which stay in the L2 cache. For a band of two:

    0 2 4 6
    1 3 5 7
    8 ...
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jax import lax

Axes = tuple[tuple[int, int, int], ...]
"""For each of several batch axes: its size, and how far a step along it is in the batches of `a` and of `b`."""


def merge_batch(a: tuple[int, ...], b: tuple[int, ...], summed: tuple[bool, ...]) -> tuple[Axes, Axes]:
    """Batch axes of a product: those that the output has, and those that it is summed over.

    Neighbours of one kind become one axis.

    Args:
      a, b: batch axes of the operands, equal or 1.
      summed: for each, whether the output is summed over it, which both operands have then.
    """
    merged: list[tuple[int, bool, bool, bool]] = []
    for m, n, over in zip(a, b, summed, strict=True):
        if m == n == 1:
            continue
        kind = (m > 1, n > 1, over)
        if merged and merged[-1][1:] == kind:
            merged[-1] = (merged[-1][0] * max(m, n), *kind)
        else:
            merged.append((max(m, n), *kind))
    found: tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]] = ([], [])
    a_stride = b_stride = 1
    for size, in_a, in_b, over in reversed(merged):
        found[over].insert(0, (size, a_stride * in_a, b_stride * in_b))
        a_stride, b_stride = a_stride * (size if in_a else 1), b_stride * (size if in_b else 1)
    return tuple(found[0]), tuple(found[1])


def turned(shape: tuple[int, int], swap: bool) -> tuple[int, int]:
    """Rows and columns of a matrix, or of its transpose."""
    return (shape[1], shape[0]) if swap else shape


def extent(axes: Axes) -> int:
    """Number of elements along all of the axes."""
    return math.prod(size for size, _, _ in axes)


def operand_indices(axes: Axes, index: Any) -> tuple[Any, Any]:
    """How far an index along all of the axes is in the batches of `a` and of `b`."""
    in_a: Any = 0
    in_b: Any = 0
    for axis in reversed(range(len(axes))):
        size, a_stride, b_stride = axes[axis]
        at = lax.rem(index, size) if axis else index
        in_a, in_b = (here + at * stride if stride else here for here, stride in ((in_a, a_stride), (in_b, b_stride)))
        if axis:
            index = lax.div(index, size)
    return in_a, in_b


@dataclass(frozen=True)
class Tiles:
    """The tiles of an output [G, M, N].

    Attributes:
      batch: batch axes, of G elements.
      m, n: rows and columns of the output.
      tile_m, tile_n: those of a tile.
      cluster_m, cluster_n: neighbouring tiles that the blocks of a cluster take together.
      band: rows of clusters in a band.
    """

    batch: Axes
    m: int
    n: int
    tile_m: int
    tile_n: int
    cluster_m: int
    cluster_n: int
    band: int

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of clusters, the last of which may lie partly or, one block of it, wholly outside."""
        return -(-self.m // (self.tile_m * self.cluster_m)), -(-self.n // (self.tile_n * self.cluster_n))

    @property
    def total(self) -> int:
        """How many there are."""
        return extent(self.batch) * math.prod(self.grid)

    def place(self, number: Any, peer: Any) -> tuple[Any, Any, Any]:
        """Batch index, first row and first column of the tile that a block of a cluster takes.

        Args:
          number: of the cluster, from 0 up to `total`.
          peer: which block of the cluster.
        """
        rows, columns = self.grid
        batch = 0
        if self.batch:
            batch, number = lax.div(number, rows * columns), lax.rem(number, rows * columns)
        row, column = self._in_bands(number, rows, columns)
        if self.cluster_m > 1:
            row = row * self.cluster_m + peer
        if self.cluster_n > 1:
            column = column * self.cluster_n + peer
        return batch, row * self.tile_m, column * self.tile_n

    def _in_bands(self, number: Any, rows: int, columns: int) -> tuple[Any, Any]:
        if self.band >= rows:
            return lax.rem(number, rows), lax.div(number, rows)
        band, rest = lax.div(number, self.band * columns), lax.rem(number, self.band * columns)
        row, column = lax.rem(rest, self.band), lax.div(rest, self.band)
        if left := rows % self.band:
            is_last = band == rows // self.band
            row = lax.select(is_last, lax.rem(rest, left), row)
            column = lax.select(is_last, lax.div(rest, left), column)
        return band * self.band + row, column

"""Tiles of an attention problem in the order in which they are taken, and arrays as TMA takes them on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import jax
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.indices import Scalar
from opmux.plugins.mosaic_gpu.attention_blocks import Problem
from opmux.plugins.mosaic_gpu.attention_config import TILE, channels
from opmux.plugins.mosaic_gpu.capability import tiled_shape
from opmux.plugins.mosaic_gpu.pallas import pad_for_simulator, pad_to, padded_for_simulator


@dataclass(frozen=True)
class Tiles:
    """The tiles of a problem in the order in which blocks of threads take them.

    Attributes:
      ctas: blocks of threads that run.
      parts: how many times each tile is taken, for as many parts of its result.
    """

    problem: Problem
    ctas: int
    parts: int = 1

    @classmethod
    def of(cls, problem: Problem, most: int | None, parts: int = 1) -> Self:
        """As many blocks of threads as there are tiles, but at most `most`."""
        count = cls(problem, 0, parts).count
        return cls(problem, min(most or count, count), parts)

    @property
    def heads(self) -> int:
        """Heads that have tiles."""
        raise NotImplementedError

    @property
    def rows(self) -> int:
        """Rows that are cut into tiles."""
        raise NotImplementedError

    @property
    def longest_last(self) -> bool:
        """Whether the last rows meet the most blocks."""
        raise NotImplementedError

    @property
    def per_head(self) -> int:
        """Tiles of one head."""
        return pl.cdiv(self.rows, TILE)

    @property
    def count(self) -> int:
        """All tiles, each as often as it is taken."""
        return self.problem.B * self.heads * self.per_head * self.parts

    @property
    def persistent(self) -> bool:
        """Whether a block of threads takes several tiles."""
        return self.ctas < self.count

    def place(self, tile: Scalar) -> tuple[Scalar, Scalar, Scalar]:
        """Batch element, head and first row of a tile; heads side by side, the longest tiles first."""
        rest, head = divide(tile, self.heads)
        b, index = divide(rest, self.per_head) if self.problem.B > 1 else (0, rest)
        return b, head, (self.per_head - 1 - index if self.longest_last else index) * TILE


class QueryTiles(Tiles):
    """Tiles of queries."""

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.problem.N

    @property
    def rows(self) -> int:
        """Queries."""
        return self.problem.T

    @property
    def longest_last(self) -> bool:
        """Under a diagonal the last queries see most."""
        return self.problem.params.right is not None


class KeyTiles(Tiles):
    """Tiles of keys."""

    @property
    def heads(self) -> int:
        """Key/value heads."""
        return self.problem.K

    @property
    def rows(self) -> int:
        """Keys."""
        return self.problem.S

    @property
    def longest_last(self) -> bool:
        """Under a diagonal the first keys are seen by most."""
        return False


# Arrays.


def divide(index: Scalar, size: int) -> tuple[Scalar, Scalar]:
    """Quotient and remainder of an index that is not negative."""
    return (lax.div(index, size), lax.rem(index, size)) if size > 1 else (index, 0)


def stream(array: jax.Array, rows: int) -> jax.Array:
    """[B, T, N, H] as TMA takes it, `rows` at a time: padded only where its tiles cannot end."""
    B, T, N, H = array.shape
    shape = (B, tiled_shape(T, H, array.dtype.itemsize)[0], N, channels(H))
    return pad_for_simulator(pad_to(array, shape), (1, rows, 1, 1))


def streamed(shape: tuple[int, ...], dtype: Any, rows: int) -> jax.ShapeDtypeStruct:
    """What `stream` makes of an array."""
    B, T, N, H = shape
    T = tiled_shape(T, H, dtype.itemsize)[0]
    return jax.ShapeDtypeStruct(padded_for_simulator((B, T, N, channels(H)), (1, rows, 1, 1)), dtype)

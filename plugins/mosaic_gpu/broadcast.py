"""How two operands of an addition lie in memory beside its output. Imports no Pallas.

Neighbouring axes that both operands have in full, or along which the same one is broadcast, are one axis in memory.
What remains are axes of three kinds in turn, and the last two of them are rows and columns:

    x [5, 1, 4, 8]  +  y [5, 3, 1, 8]      out [5, 3, 4, 8]
       full, x broadcast, y broadcast, full
       └────── batch ──┘  rows         columns
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operand:
    """One operand beside an output of [batch, rows, columns].

    Attributes:
      shape: its own [batch, rows, columns]; rows or columns are 1 where it is broadcast along them.
      batch_strides: for each batch axis of the output, how far one step is in the operand's batch.
    """

    shape: tuple[int, int, int]
    batch_strides: Shape


@dataclass(frozen=True)
class Layout:
    """An addition as rows and columns.

    Attributes:
      batch: batch axes of the output.
      rows, columns: the last two axes of the output.
      x, y: the operands.
    """

    batch: Shape
    rows: int
    columns: int
    x: Operand
    y: Operand

    @property
    def is_flat(self) -> bool:
        """Whether the output is one axis; an operand may still be a scalar."""
        return not self.batch and self.rows == 1


def layout(x: Shape, y: Shape) -> Layout:
    """The layout of two shapes of one rank, whose axes are equal or 1."""
    merged: list[tuple[int, int]] = []
    last: tuple[bool, bool] | None = None
    for m, n in zip(x, y, strict=True):
        if m == n == 1:
            continue
        how = (m == 1, n == 1)
        if how == last:
            merged[-1] = (merged[-1][0] * m, merged[-1][1] * n)
        else:
            merged.append((m, n))
        last = how
    merged = [(1, 1)] * (2 - len(merged)) + merged
    sizes = tuple(max(pair) for pair in merged)
    first, second = (_operand(tuple(pair[side] for pair in merged)) for side in (0, 1))
    return Layout(sizes[:-2], sizes[-2], sizes[-1], first, second)


def _operand(shape: Shape) -> Operand:
    batch = shape[:-2]
    strides = tuple(0 if size == 1 else math.prod(batch[axis + 1 :]) for axis, size in enumerate(batch))
    return Operand((math.prod(batch), shape[-2], shape[-1]), strides)

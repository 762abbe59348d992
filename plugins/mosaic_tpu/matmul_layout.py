"""A canonical product of batches as the kernel takes it: few batch axes, and no column by itself. Imports no Pallas.

    a [*Ba, M, K] · b [*Bb, K, N]  ─►  left [*Bl, P, R] · right [*Br, R, Q]  ─►  out [*B, P, Q]

Every array is reshaped, and nothing is transposed or broadcast in memory:

* neighbouring batch axes that broadcast in the same way are one;
* batch axes that the right factor is broadcast along, and that lie next to the rows, are rows;
* a single column is computed as a row: `(a · b)ᵀ = bᵀ · aᵀ`, where the kernel reads `a` as a transposed factor. Of
  a column each element would lie in a row of 128 lanes of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from opmux.plugins.mosaic_tpu.dense_config import SUBLANES

MERGED_ROWS = 512
"""Rows of one batch element from which they are merged only where no row of tiles is shared between elements.

Otherwise merging costs a copy of the left factor, and not merging a pass over the right one for each element.
"""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Shapes of the factors and of the result.

    Attributes:
      left: [*Bl, P, R]; a batch axis is as long as that of `out`, or 1.
      right: [*Br, R, Q], or [*Br, Q, R] where `turned`.
      out: [*B, P, Q].
      turned: `b` is the left factor, and `a` the right one.
    """

    left: Shape
    right: Shape
    out: Shape
    turned: bool


def layout(a: Shape, b: Shape) -> Layout:
    """The layout of a product of arrays of these shapes, [*Ba, M, K] and [*Bb, K, N]."""
    (M, K), N = a[-2:], b[-1]
    turned = N == 1 < M
    first, second, rows = (b, a, 1) if turned else (a, b, M)
    groups: list[tuple[tuple[bool, bool], list[tuple[int, int]]]] = []
    for m, n in zip(first[:-2], second[:-2], strict=True):
        if m == n == 1:
            continue
        how = (m == 1, n == 1)
        if not groups or groups[-1][0] != how:
            groups.append((how, []))
        groups[-1][1].append((m, n))
    if groups and groups[-1][0] == (False, True) and (rows % SUBLANES == 0 or rows < MERGED_ROWS):
        rows *= math.prod(m for m, _ in groups.pop()[1])
    left = tuple(math.prod(m for m, _ in sizes) for _, sizes in groups)
    right = tuple(math.prod(n for _, n in sizes) for _, sizes in groups)
    out = tuple(map(max, left, right))
    columns = M if turned else N
    return Layout(
        (*left, rows, K), (*right, *((columns, K) if turned else (K, columns))), (*out, rows, columns), turned
    )

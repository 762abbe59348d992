"""Factors of a product as sums of pieces that the matrix units multiply exactly.

The units multiply bfloat16, of 8 significant bits, and add in float32. A float32 is the sum of three such numbers:

    x = x₀ + x₁ + x₂      x₀ = bf16(x), x₁ = bf16(x - x₀), x₂ = bf16(x - x₀ - x₁)
    x · y ≈ x₀y₀ + (x₀y₁ + x₁y₀) + (x₀y₂ + x₁y₁ + x₂y₀)

`HIGHEST` makes these six products, with an error of 2⁻²⁴, `HIGH` the first three, and `DEFAULT` the first one. The
compiler has the same products (`precision` of a dot in a kernel), but splits each register where it multiplies it,
once for every block of the other factor, and spills registers over it. Here a block is split once: see
`matmul_split`. And the simulator, which knows nothing of passes, makes the same products. Imports no Pallas.

Infinities and NaN are in x₀ of the first product alone; in the others they are 0, or they would meet pieces of the
other sign. So a factor of several pieces is stored as x₀ with them, x₀ without them, x₁, and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import lax

_PIECES = {lax.Precision.DEFAULT: 1, lax.Precision.HIGH: 2, lax.Precision.HIGHEST: 3}


def count_pieces(
    dtypes: tuple[np.dtype[Any], np.dtype[Any]], precision: lax.Precision, int8_as_is: bool
) -> tuple[int, int]:
    """How many arrays of bfloat16 stand for the left and for the right factor; 0 for one that is taken as it is.

    Two float32 at `DEFAULT` are: the units round them.
    """
    several = precision != lax.Precision.DEFAULT and np.float32 in dtypes

    def count(dtype: np.dtype[Any]) -> int:
        if dtype == np.int8:
            return int(not int8_as_is)
        if several:
            return 1 + (_PIECES[precision] if dtype == np.float32 else 1)
        return int(dtype == np.float32 and dtypes[0] != dtypes[1])

    return count(dtypes[0]), count(dtypes[1])


def products_of_pieces(left: int, right: int) -> Iterator[tuple[int, int]]:
    """Numbers of the arrays that are multiplied with each other, the smallest products first."""
    for order in reversed(range(1, max(left, right) - 1)):
        yield from ((1 + i, 1 + order - i) for i in range(order + 1) if i < left - 1 and order - i < right - 1)
    yield 0, 0

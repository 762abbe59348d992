"""Products of float32 as sums of products that `wgmma` has. Imports no Pallas.

A float32 is the sum of three bfloat16, of eight bits each, and a product of two of them is the sum of nine products.
The smaller ones can be left out:

    x = x0 + x1 + x2      x y  ≈  x0 y0                           one pair, 2^-8
                                + x1 y0 + x0 y1                   three, 2^-16
                                + x2 y0 + x1 y1 + x0 y2           six, 2^-24, as good as float32

They are summed from the smallest to the largest. What is not finite is in x0 and y0 alone; the sum of the smaller
pairs, where it is not finite, is left out, and the result is what x0 y0 has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Terms:
    """Pairs of terms of two operands.

    Attributes:
      a, b: terms that each operand is the sum of.
      order: pairs whose indices sum to more are left out.
    """

    a: int = 1
    b: int = 1
    order: int = 0

    @property
    def _pairs(self) -> list[tuple[int, int]]:
        every = [(i, j) for i in range(self.a) for j in range(self.b) if i + j <= self.order]
        return sorted(every, key=lambda pair: -sum(pair))

    @property
    def pairs(self) -> int:
        """How many pairs there are; the last one is that of the largest terms."""
        return len(self._pairs)

    def indices(self, pair: Any) -> tuple[Any, Any]:
        """The terms of `a` and of `b` in a pair."""
        if self.pairs == 1:
            return 0, 0
        tables = (sum(each[side] << 2 * at for at, each in enumerate(self._pairs)) for side in (0, 1))
        first, second = ((table >> 2 * pair) & 3 for table in tables)
        return first, second

    @staticmethod
    def finite(total: jax.Array) -> jax.Array:
        """The sum, and zero where it is not finite."""
        return jnp.where(jnp.abs(total) < jnp.inf, total, jnp.zeros_like(total))


def split(x: jax.Array, terms: int) -> jax.Array:
    """[terms, *shape]: bfloat16 that sum to a float32, the largest first."""
    largest = float(jnp.finfo(jnp.bfloat16).max)
    finite = jnp.isfinite(x)
    parts: list[jax.Array] = []
    rest = x
    for _ in range(terms):
        # Explicitly rounded, since XLA may leave out a conversion that is converted back.
        part = lax.reduce_precision(jnp.where(finite, jnp.clip(rest, -largest, largest), rest), 8, 7)
        parts.append(part.astype(jnp.bfloat16))
        rest = jnp.where(finite, rest - part, 0)
    return jnp.stack(parts)

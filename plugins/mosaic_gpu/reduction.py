"""Kinds of reduction, as the kernels see them: how two elements join, and what is done to a total."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core import compat

_JOIN: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "sum": jnp.add, "prod": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum,
}  # fmt: skip
_ACROSS: dict[str, Callable[..., jax.Array]] = {"sum": jnp.sum, "max": jnp.max, "min": jnp.min}


@dataclass(frozen=True)
class Reduction:
    """One pass of a reduction.

    Attributes:
      kind: `sum`, `prod`, `max` or `min`.
      acc: float32 or int32: dtype in which elements join.
      out: dtype of the pass's result.
      divisor: what a total is divided by: for a mean, in its last pass.
    """

    kind: str
    acc: np.dtype[Any]
    out: np.dtype[Any]
    divisor: int = 1

    def load(self, elements: jax.Array) -> jax.Array:
        """Elements as they join."""
        if jnp.issubdtype(elements.dtype, jnp.floating):
            elements = elements.astype(jnp.float32)
        return elements.astype(self.acc)

    def join(self, one: jax.Array, other: jax.Array) -> jax.Array:
        """Two elements as one; NaN wins."""
        return _JOIN[self.kind](one, other)

    def across(self, array: jax.Array) -> jax.Array:
        """The last axis of a register array; products cannot be taken across the lanes of a warpgroup."""
        if self.kind != "sum" and compat.in_gpu_simulator():
            # A GPU keeps NaN. XLA's reductions on a CPU, which the simulator runs on, lose it (openxla/xla#21461).
            while (width := array.shape[-1]) > 1:
                array = self.join(array[..., : width // 2], array[..., width // 2 :])
            return array[..., 0]
        return _ACROSS[self.kind](array, axis=-1)

    def identity(self, dtype: Any) -> Any:
        """What joins without changing anything."""
        if self.kind in ("sum", "prod"):
            return np.asarray(self.kind == "prod", dtype)
        if jnp.issubdtype(dtype, jnp.integer):
            info = jnp.iinfo(dtype)
            return np.asarray(info.min if self.kind == "max" else info.max, dtype)
        return np.asarray(-np.inf if self.kind == "max" else np.inf, dtype)

    def start(self, shape: tuple[int, ...]) -> jax.Array:
        """An accumulator that nothing has joined."""
        return jnp.full(shape, self.identity(self.acc).item(), self.acc)

    def finish(self, total: jax.Array) -> jax.Array:
        """The result of a total, rounded once."""
        if self.divisor != 1:
            total = total / float(self.divisor)
        return total.astype(self.out)

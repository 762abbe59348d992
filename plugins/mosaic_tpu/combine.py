"""How partial results of a reduction are joined, in terms that Mosaic compiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_JOIN = {"sum": jnp.add, "prod": jnp.multiply, "max": jnp.maximum, "min": jnp.minimum}


@dataclass(frozen=True)
class Reduction:
    """An associative combination of numbers.

    Attributes:
      kind: which.
      dtype: float32 or int32, in which it is computed.
    """

    kind: Literal["sum", "max", "min", "prod"]
    dtype: np.dtype[Any]

    @property
    def identity(self) -> Any:
        """What joins without changing the result."""
        if self.kind in ("sum", "prod"):
            return np.asarray(self.kind == "prod", self.dtype)
        lowest = self.kind == "max"
        if self.dtype.kind == "i":
            return np.asarray(np.iinfo(self.dtype).min if lowest else np.iinfo(self.dtype).max, self.dtype)
        return np.asarray(-np.inf if lowest else np.inf, self.dtype)

    def join(self, one: jax.Array, other: jax.Array) -> jax.Array:
        """Two partial results."""
        return _JOIN[self.kind](one, other)

    def mask(self, block: jax.Array, axis: int, length: Any) -> jax.Array:
        """The block with the identity in place of what lies at and after `length`, where anything may be."""
        place = lax.broadcasted_iota(jnp.int32, block.shape, axis)
        return jnp.where(place < length, block, self.identity)

    def over_axis(self, block: jax.Array, axis: int, keep: bool = True) -> jax.Array:
        """The block reduced over an axis, which keeps length 1 or is dropped."""
        if self.kind == "sum":
            # The dtype is repeated because jnp would widen int32 where 64 bits are enabled.
            return jnp.sum(block, axis=axis, keepdims=keep, dtype=self.dtype)
        # Mosaic has no reduction by products, and XLA's by maxima loses NaN on some CPUs, which elementwise ones keep.
        size = block.shape[axis]
        step = size // 2 if size & (size - 1) == 0 else 1
        while size > 1:
            total = lax.slice_in_dim(block, 0, step, axis=axis)
            for start in range(step, size, step):
                total = self.join(total, lax.slice_in_dim(block, start, start + step, axis=axis))
            block, size, step = total, step, step // 2
        return block if keep else lax.squeeze(block, (axis,))

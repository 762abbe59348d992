"""Indices that kernels reckon with: Python ints as long as they are the same for every call and grid point."""

from __future__ import annotations

import jax
import jax.numpy as jnp

Scalar = int | jax.Array
"""An index: a Python int, or a traced int32."""


def smallest(a: Scalar, b: Scalar) -> Scalar:
    """The lesser of two indices."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def largest(a: Scalar, b: Scalar) -> Scalar:
    """The greater of two indices."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)

"""Scores of the attention kernels of a GPU: what a product of queries and keys becomes before the exponential."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from opmux.plugins.mosaic_gpu.attention_blocks import Problem

LOG2_E = math.log2(math.e)

_LOWEST = -2e38


@dataclass(frozen=True)
class Scores:
    """How products become exponents of 2: what `of` gives, times `factor`, which is left to the exponential's own FMA.

    The factor is positive in the forward, where `attention` sees to it.
    """

    problem: Problem

    @property
    def factor(self) -> float:
        """What the values of `of` are multiplied by."""
        params = self.problem.params
        if self.problem.bias is not None:
            return LOG2_E
        return (params.scale if params.soft_cap is None else params.soft_cap) * LOG2_E

    def of(self, products: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Values of a block, and the derivative of a score by its scaled product, where that is not 1."""
        params = self.problem.params
        slope = None
        if params.soft_cap is not None:
            products = tanh(products * (params.scale / params.soft_cap))
            slope = 1 - products * products
        if bias is None:
            return products, slope
        scores = products * (params.scale if params.soft_cap is None else params.soft_cap) + bias
        # So that the lowest numbers are no infinities when they are multiplied: a row of nothing else is flat.
        return jnp.maximum(scores, _LOWEST), slope


def tanh(x: jax.Array) -> jax.Array:
    """The hyperbolic tangent to float32's precision; the device's own instruction has eleven bits."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))

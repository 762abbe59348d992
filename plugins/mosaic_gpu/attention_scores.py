"""Scores of the attention kernels of a GPU: what a product of queries and keys becomes before the exponential."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from opmux.plugins.mosaic_gpu.attention_blocks import Problem

LOG2_E = math.log2(math.e)

LOWEST = float(np.finfo(np.float32).min)
"""The top of a row that has seen nothing: what is hidden is lower, at -inf, and weighs 0 beside it."""


@dataclass(frozen=True)
class Scores:
    """How products become weights: what `of` gives, times `factor`, less the top of a row, is an exponent.

    Exponents are of 2, and the factor is left to the exponential's own FMA, but natural where there is a bias, which
    may be as low as float32 goes: rounded once and not the other time, such a number differs from itself by 1e31.

    The factor is positive in the forward, where `attention` sees to it.
    """

    problem: Problem

    @property
    def unit(self) -> float:
        """Exponents for one of a natural exponent; tops and log-sum-exps are in it."""
        return 1.0 if self.problem.bias is not None else LOG2_E

    @property
    def factor(self) -> float:
        """What the values of `of` are multiplied by."""
        params = self.problem.params
        if self.problem.bias is not None:
            return 1.0
        return (params.scale if params.soft_cap is None else params.soft_cap) * LOG2_E

    def power(self, exponents: jax.Array) -> jax.Array:
        """The weights of exponents."""
        return jnp.exp2(exponents * LOG2_E if self.problem.bias is not None else exponents)

    def weights(self, values: jax.Array, tops: jax.Array) -> jax.Array:
        """The weights of values of `of` beside the tops, or the log-sum-exps, of their rows."""
        return self.power(values * self.factor - tops)

    def of(self, products: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        """Values of a block, and the derivative of a score by its scaled product, where that is not 1."""
        params = self.problem.params
        slope = None
        if params.soft_cap is not None:
            products = tanh(products * (params.scale / params.soft_cap))
            slope = 1 - products * products
        if bias is None:
            return products, slope
        return products * (params.scale if params.soft_cap is None else params.soft_cap) + bias, slope


def tanh(x: jax.Array) -> jax.Array:
    """The hyperbolic tangent to float32's precision; the device's own instruction has eleven bits."""
    return 1 - 2 / (1 + jnp.exp2(x * (2 * LOG2_E)))

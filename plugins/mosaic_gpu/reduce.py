"""`reduce` on a GPU of compute capability 9.0 or 10.x.

A reduction runs in passes, each of which is a reshape and one kernel:

    large, last axis     rows       [A, R] as [A k, R/k]         ──► [A, k]
    large, inner axis    columns    [A, R, B] in k parts         ──► [A, k, B]
                                    as [A, R/k, k B], if narrow  ──► [A, k, B]
    small, and k > 1     direct     [R, C]                       ──► [C]

The k partial results are there because one block to a result would leave most multiprocessors without work.
Products over the last axis go by columns: lanes cannot multiply across a warpgroup. An operand whose rows TMA
cannot address is padded with the identity first, which copies it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.config import Config
from opmux.core.ops.reduce import ReduceParams, outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_gpu.pallas import COMPUTE_WARPGROUPS, pad_axis
from opmux.plugins.mosaic_gpu.reduce_columns import reduce_columns
from opmux.plugins.mosaic_gpu.reduce_config import LINE_BYTES, TILE_ROWS, ReduceConfig
from opmux.plugins.mosaic_gpu.reduce_direct import reduce_direct
from opmux.plugins.mosaic_gpu.reduce_rows import reduce_rows
from opmux.plugins.mosaic_gpu.reduction import Reduction

_ALIGNMENT = 16
_LANES = 128


def reduce(request: Request, operands: Operands, config: Config) -> Outputs:
    """Reduces the odd axes of the canonical operand, from the last of them to the first.

    Args:
      request: a request of `reduce`.
      operands: `x`, [A, R, B, ...].
      config: a `ReduceConfig`.
    """
    config = cast(ReduceConfig, config)
    params: ReduceParams = request.params
    x = operands["x"]
    out = outputs(request)["out"]
    terms = math.prod(x.shape[1::2])
    kind = "sum" if params.kind == "mean" else params.kind
    floating = jnp.issubdtype(params.acc, jnp.floating)
    acc = np.dtype(np.float32) if floating else params.acc
    # Rounding is the kernel's, once and from the accumulator; conversions between kinds of dtypes are XLA's.
    rounds = floating and jnp.issubdtype(params.dtype, jnp.floating)
    last = Reduction(kind, acc, params.dtype if rounds else acc, terms if params.kind == "mean" and floating else 1)
    if not x.size:
        nothing = jnp.full(out.shape, last.identity(acc), acc)
        total = nothing / terms if last.divisor != 1 else nothing
        return {"out": total.astype(params.dtype)}

    while x.ndim > 3:
        *kept, R, B = x.shape
        inner = _reduce(x.reshape(math.prod(kept), R, B), _between(last), config)
        x = inner.reshape(*kept[:-1], kept[-1] * B)
    total = _reduce(x, last, config).reshape(out.shape)
    if params.kind == "mean" and not floating:
        total = lax.div(total, jnp.full(total.shape, terms, acc))
    return {"out": total.astype(params.dtype)}


def _reduce(x: jax.Array, reduction: Reduction, config: ReduceConfig) -> jax.Array:
    """Reduces [A, R, B] to [A, B] in as many passes as it takes."""
    A, R, B = x.shape
    if x.nbytes < config.tma_bytes or R == 1:
        return _join(x, reduction)
    if B == 1 and reduction.kind != "prod":
        return _rows(x.reshape(A, R), reduction, config).reshape(A, B)
    return _columns(x, reduction, config)


def _rows(x: jax.Array, reduction: Reduction, config: ReduceConfig) -> jax.Array:
    """Reduces [A, R] to [A] by rows of tiles."""
    A = x.shape[0]
    line = LINE_BYTES // x.dtype.itemsize
    x = pad_axis(x, 1, line, reduction.identity(x.dtype))
    lines = x.shape[1] // line
    # At least four lines in each part; and rows in eights, as the tile's swizzle has them.
    eights = 8 // math.gcd(A, 8)
    wanted = max(1, min(-(-TILE_ROWS * config.num_ctas // A), lines // 4))
    fitting = [k for k in range(eights, min(lines, 8 * wanted) + 1, eights) if lines % k == 0]
    parts = _even_parts(fitting, lambda k: -(-A * k // TILE_ROWS), config.num_ctas, x.shape[1])
    if 4 * parts < wanted:  # no divisor comes near
        parts = wanted + -wanted % eights
        x = pad_axis(x, 1, line * parts, reduction.identity(x.dtype))
    rows = x.reshape(A * parts, -1)
    if parts == 1:
        return reduce_rows(rows, reduction, config)
    partial = reduce_rows(rows, _between(reduction), config)
    return _small(partial.reshape(A, parts).T, reduction)


def _columns(x: jax.Array, reduction: Reduction, config: ReduceConfig) -> jax.Array:
    """Reduces [A, R, B] to [A, B] by columns of tiles."""
    A, R, B = x.shape
    aligned = _ALIGNMENT // x.dtype.itemsize
    width = COMPUTE_WARPGROUPS * config.tile_n
    if width > B or B % aligned:
        # Several rows side by side are as wide as a tile, and begin where TMA can begin.
        least = -(-width // B)
        beside = next((k for k in range(least, R) if R % k == 0 and k * B % aligned == 0), 0)
        if not beside and width >= 8 * B:
            beside = least + -least % aligned
            x = pad_axis(x, 1, beside, reduction.identity(x.dtype))
        if beside:
            partial = _columns(x.reshape(A, -1, beside * B), _between(reduction), config)
            return _join(partial.reshape(A, beside, B), reduction)
        x = pad_axis(x, 2, aligned, reduction.identity(x.dtype))
    # At least four tiles in each part.
    tile_r = config.tile_r * (4 // x.dtype.itemsize)
    across = A * -(-x.shape[2] // width)
    most = max(1, min(2 * -(-config.num_ctas // across), R // (4 * tile_r)))
    parts = _even_parts(range(1, most + 1), lambda k: across * k, config.num_ctas, R)
    if parts == 1:
        return reduce_columns(x, reduction, config, 1)[:, 0, :B]
    return _join(reduce_columns(x, _between(reduction), config, parts)[:, :, :B], reduction)


def _even_parts(choices: Iterable[int], tiles: Callable[[int], int], num_ctas: int, terms: int) -> int:
    """The number of parts that keeps the blocks busy to the end, against what its partial results cost; 0 of none.

    Args:
      choices: numbers to choose from.
      tiles: tiles for a number of parts.
      num_ctas: blocks that take tiles in turn.
      terms: elements that are reduced to one; each part writes one, which is read again.
    """

    def cost(parts: int) -> float:
        rounds = -(-tiles(parts) // num_ctas)
        return rounds / parts * (1 + 2 * parts / terms)

    return min(choices, key=cost, default=0)


def _between(reduction: Reduction) -> Reduction:
    """A pass whose results are partial ones."""
    return dataclasses.replace(reduction, out=reduction.acc, divisor=1)


def _join(x: jax.Array, reduction: Reduction) -> jax.Array:
    """Reduces a small [A, R, B] to [A, B]."""
    A, R, B = x.shape
    return _small(jnp.moveaxis(x, 1, 0).reshape(R, A * B), reduction).reshape(A, B)


def _small(x: jax.Array, reduction: Reduction) -> jax.Array:
    """Reduces [R, C] to [C] through registers; a long axis of few columns is folded until it is short."""
    R, C = x.shape
    beside = min(4 * _LANES // C, -(-R // 32))
    if R <= 64 or beside < 2:
        return reduce_direct(x, reduction)
    x = pad_axis(x, 0, beside, reduction.identity(x.dtype))
    partial = reduce_direct(x.reshape(-1, beside * C), _between(reduction))
    return _small(partial.reshape(beside, C), reduction)

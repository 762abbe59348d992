"""`matmul` and its backward on a GPU of compute capability 9.0.

Both are products of one kernel, `d_a = d_out bT` and `d_b = aT d_out`: `wgmma` reads operands of 16 bits that are
transposed in shared memory. Those of other sizes have to lie along K, and are transposed in device memory where
they do not. An operand is copied only if TMA cannot address it: a row that does not begin at a multiple of 16 bytes or
is no whole number of swizzled lines (of 64 elements of 16 bits), or a number of rows that is no multiple of eight.
"""

from __future__ import annotations

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core.config import Config
from opmux.core.ops.matmul import MatmulParams, Precision, outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_gpu.capability import tiled_shape
from opmux.plugins.mosaic_gpu.dot import acc_dtype
from opmux.plugins.mosaic_gpu.matmul_config import MatmulConfig
from opmux.plugins.mosaic_gpu.matmul_elements import Elements, elements
from opmux.plugins.mosaic_gpu.matmul_kernel import Product, multiply
from opmux.plugins.mosaic_gpu.matmul_terms import split
from opmux.plugins.mosaic_gpu.matmul_tiles import Axes, Tiles, extent, merge_batch
from opmux.plugins.mosaic_gpu.pallas import pad_for_simulator, pad_to, padded_for_simulator

_STORED = tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16)))


def matmul(request: Request, operands: Operands, config: Config) -> Outputs:
    """Multiplies tile by tile.

    Args:
      request: a request of `matmul`.
      operands: `a`, [*Ba, M, K], and `b`, [*Bb, K, N], with batch axes of equal length or 1.
      config: a `MatmulConfig`.
    """
    params: MatmulParams = request.params
    batch = outputs(request)["out"].shape[:-2]
    return {"out": _product(operands["a"], operands["b"], batch, params.dtype, params.precision, config)}


def matmul_vjp(request: Request, operands: Operands, config: Config) -> Outputs:
    """Cotangents of `a` and `b`: `d_out bT` and `aT d_out`, summed over axes along which the operand was broadcast.

    Args:
      request: a request of `matmul_vjp`.
      operands: `a` and `b` as in `matmul`, and `d_out`, [*B, M, N].
      config: a `MatmulConfig`.
    """
    a, b, d_out = operands["a"], operands["b"], operands["d_out"]
    precision = request.params.precision
    cotangents: Outputs = {}
    if "a" in request.wanted:
        cotangents["a"] = _product(d_out, b, a.shape[:-2], a.dtype, precision, config, b_transposed=True)
    if "b" in request.wanted:
        cotangents["b"] = _product(a, d_out, b.shape[:-2], b.dtype, precision, config, a_transposed=True)
    return cotangents


def _product(
    a: jax.Array, b: jax.Array, batch: tuple[int, ...], dtype: np.dtype[Any], precision: Precision, config: Config,
    *, a_transposed: bool = False, b_transposed: bool = False,
) -> jax.Array:  # fmt: skip
    """The product, summed over batch axes that have length 1 in `batch` and more in both operands.

    Args:
      a: [*Ba, M, K], or [*Ba, K, M] if it is transposed.
      b: [*Bb, K, N], or [*Bb, N, K].
      batch: batch axes of the result.
      dtype: of the result.
      precision: as the op has it.
      config: a `MatmulConfig`.
    """
    M, K = a.shape[-2:][:: -1 if a_transposed else 1]
    N = b.shape[-2 if b_transposed else -1]
    shape = (*batch, M, N)
    if not math.prod((*shape, K, *a.shape[:-2], *b.shape[:-2])):
        return jnp.zeros(shape, dtype)
    kind = elements(a.dtype, b.dtype, precision)
    assert kind is not None, "refused by the predicate"
    every, summed = merge_batch(a.shape[:-2], b.shape[:-2], tuple(size == 1 for size in batch))
    left, right = _in_terms(a, kind, 0), _in_terms(b, kind, 1)
    if not kind.transposes:
        left, a_transposed = (left.mT, False) if a_transposed else (left, False)
        right, b_transposed = (right, True) if b_transposed else (right.mT, True)

    # Rows and batch axes that follow each other in memory are one axis.
    rows, inner = M, K
    if len(every) == 1 and not summed and not every[0][2] and not a_transposed:
        rows, every = M * extent(every), ()
        left = left.reshape(left.shape[0], 1, rows, K)
    if len(summed) == 1 and summed[0][1:] == (1, 1) and a_transposed and not b_transposed:
        size = extent(summed)
        inner, summed = K * size, ()
        every = tuple((axis, in_a // size, in_b // size) for axis, in_a, in_b in every)
        left, right = left.reshape(left.shape[0], -1, inner, M), right.reshape(right.shape[0], -1, inner, N)

    acc = acc_dtype(kind.dtype)
    stored = dtype if dtype in _STORED and acc == np.float32 else acc
    out = _multiply(left, right, (rows, N, inner), every, summed, (a_transposed, b_transposed), kind, stored, config)
    return out.reshape(shape).astype(dtype)


def _in_terms(x: jax.Array, kind: Elements, side: int) -> jax.Array:
    """[terms, G, rows, columns]."""
    terms = (kind.terms.a, kind.terms.b)[side]
    x = x.reshape(-1, *x.shape[-2:])
    if terms == 1:
        return x[None].astype(kind.dtype)
    return split(x.astype(jnp.float32), terms)


def _multiply(
    a: jax.Array, b: jax.Array, sizes: tuple[int, int, int], batch: Axes, summed: Axes,
    transposed: tuple[bool, bool], kind: Elements, dtype: np.dtype[Any], config: Config,
) -> jax.Array:  # fmt: skip
    """[G, M, N] of [terms, Ga, M, K] and [terms, Gb, K, N], or transposed ones: padded where TMA needs it."""
    config = cast(MatmulConfig, config)
    M, N, K = sizes
    tiles = Tiles(
        batch=batch, m=M, n=N, tile_m=config.tile_m, tile_n=config.tile_n,
        cluster_m=2 if config.cluster == "m" else 1, cluster_n=2 if config.cluster == "n" else 1, band=config.band,
    )  # fmt: skip
    tile_k = config.tile_k * 2 // kind.dtype.itemsize
    rows, columns = M + (-M % 8 if M > 8 else 0), N + -N % (16 // dtype.itemsize)
    out_shape = padded_for_simulator((extent(batch), rows, columns), (1, tiles.tile_m, tiles.tile_n))
    product = Product(
        tiles=tiles, terms=kind.terms, summed=summed, length=K, tile_k=tile_k,
        batches=(a.shape[1], b.shape[1]), transposed=transposed, num_stages=config.num_stages,
        num_ctas=config.num_ctas, swizzled=tiled_shape(rows, columns, dtype.itemsize) == (rows, columns),
    )  # fmt: skip
    a_tile, b_tile = product.operand_tiles
    out = multiply(_addressable(a, a_tile), _addressable(b, b_tile), jax.ShapeDtypeStruct(out_shape, dtype), product)
    return out[:, :M, :N]


def _addressable(x: jax.Array, tile: tuple[int, int]) -> jax.Array:
    """[terms * G, rows, columns] as TMA can cut it into tiles; padded with zeros where it has to be."""
    x = x.reshape(-1, *x.shape[-2:])
    shape = (x.shape[0], *tiled_shape(x.shape[-2], x.shape[-1], x.dtype.itemsize))
    return pad_for_simulator(pad_to(x, shape), (1, *tile))

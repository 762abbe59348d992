"""The backward of `matmul`: two products through the kernel of the forward.

    d_left = d_out · rightᵀ        d_right = leftᵀ · d_out

The kernel takes the transposed factor as it lies in memory. Batch axes that a factor was broadcast along are axes of
the sum, so no cotangent is larger than its operand.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp

from opmux.core import compat
from opmux.core.config import Config
from opmux.core.ops.matmul import MatmulParams
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu.matmul_config import MatmulVjpConfig, product_precision
from opmux.plugins.mosaic_tpu.matmul_layout import layout
from opmux.plugins.mosaic_tpu.matmul_product import Product


def matmul_vjp(request: Request, operands: Operands, config: Config) -> Outputs:
    """Cotangents of `a` and `b`.

    Args:
      request: a request of `matmul_vjp`.
      operands: `a`, [*Ba, M, K], `b`, [*Bb, K, N], and `d_out`, [*B, M, N].
      config: a `MatmulVjpConfig`.
    """
    config = cast(MatmulVjpConfig, config)
    params: MatmulParams = request.params
    if not all(array.size for array in operands.values()):
        # Pallas has no grid over nothing; a sum of no terms is 0.
        return {
            name: compat.vary_like(jnp.zeros(request[name].shape, request[name].dtype), operands.values())
            for name in request.wanted
        }
    where = layout(request["a"].shape, request["b"].shape)
    names = ("b", "a") if where.turned else ("a", "b")
    left, right = (operands[name].reshape(shape) for name, shape in zip(names, (where.left, where.right), strict=True))
    d_out = operands["d_out"].reshape(where.out)
    precision = product_precision(params.precision)

    def d_left() -> jax.Array:
        multiply = Product(
            batch=where.left[:-2],
            dtype=left.dtype,
            most=(config.da_block_m, config.da_block_n, config.da_block_k),
            right_transposed=not where.turned,
            name="matmul_d_left",
            precision=precision,
            vmem_limit_bytes=config.vmem_limit_bytes,
        )
        return multiply(d_out, right)

    def d_right() -> jax.Array:
        multiply = Product(
            batch=where.right[:-2],
            dtype=right.dtype,
            most=(config.db_block_m, config.db_block_n, config.db_block_k),
            left_transposed=True,
            name="matmul_d_right",
            precision=precision,
            vmem_limit_bytes=config.vmem_limit_bytes,
        )
        return multiply(d_out, left) if where.turned else multiply(left, d_out)

    return {
        name: cotangent().reshape(request[name].shape)
        for name, cotangent in zip(names, (d_left, d_right), strict=True)
        if name in request.wanted
    }

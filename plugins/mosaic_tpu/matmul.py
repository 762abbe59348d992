"""`matmul` as a Mosaic TPU kernel: see `matmul_product` for the kernel and `matmul_layout` for what it is given."""

from __future__ import annotations

from typing import cast

import jax.numpy as jnp

from opmux.core import compat
from opmux.core.config import Config
from opmux.core.ops.matmul import MatmulParams, outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu.matmul_config import MatmulConfig, product_precision
from opmux.plugins.mosaic_tpu.matmul_layout import layout
from opmux.plugins.mosaic_tpu.matmul_product import Product


def matmul(request: Request, operands: Operands, config: Config) -> Outputs:
    """Multiplies block by block.

    Args:
      request: a request of `matmul`.
      operands: `a`, [*Ba, M, K], and `b`, [*Bb, K, N], of one dtype, with batch axes of equal length or 1.
      config: a `MatmulConfig`.
    """
    config = cast(MatmulConfig, config)
    params: MatmulParams = request.params
    a, b = operands["a"], operands["b"]
    out = outputs(request)["out"]
    if not out.size or not a.shape[-1]:
        # Pallas has no grid over nothing; a sum of no terms is 0.
        return {"out": compat.vary_like(jnp.zeros(out.shape, out.dtype), (a, b))}
    where = layout(a.shape, b.shape)
    left, right = (b, a) if where.turned else (a, b)
    multiply = Product(
        batch=where.out[:-2],
        dtype=out.dtype,
        precision=product_precision(params.precision),
        most=(config.block_m, config.block_n, config.block_k),
        vmem_limit_bytes=config.vmem_limit_bytes,
        int8_unit=config.int8_unit,
        right_transposed=where.turned,
    )
    return {"out": multiply(left.reshape(where.left), right.reshape(where.right)).reshape(out.shape)}

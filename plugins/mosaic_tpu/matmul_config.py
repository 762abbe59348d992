"""What the products of `matmul` take on TPUs, and how they are tuned. Imports no Pallas."""

from __future__ import annotations

import math
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
from jax import lax
from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.ops.matmul import MatmulParams, Precision
from opmux.core.request import Request
from opmux.plugins.mosaic_tpu import matmul_tuning
from opmux.plugins.mosaic_tpu.dense_config import LANES, SUBLANES
from opmux.plugins.mosaic_tpu.matmul_layout import Shape, layout
from opmux.plugins.mosaic_tpu.matmul_pieces import count_pieces, products_of_pieces


class MatmulConfig(Config):
    """Blocks of a product as `matmul_layout` lays it out. Each is a maximum: no block is longer than its axis.

    Attributes:
      block_m: rows of the left factor in one block.
      block_n: columns of the right factor in one block.
      block_k: terms of the sum in one block; partial sums are kept in an accumulator between blocks.
      vmem_limit_bytes: vector memory that the kernel may use; by default what the blocks need.
      int8_unit: int8 is multiplied as it is; otherwise as bfloat16, which is exact too.
    """

    block_m: int = Field(default=512, gt=0, multiple_of=2 * SUBLANES)
    block_n: int = Field(default=512, gt=0, multiple_of=LANES)
    block_k: int = Field(default=512, gt=0, multiple_of=LANES)
    vmem_limit_bytes: int | None = Field(default=None, gt=0)
    int8_unit: bool = True


class MatmulVjpConfig(Config):
    """Blocks of the two products of the backward, each of which has rows, columns and terms of its own.

    Attributes:
      da_block_m, da_block_n, da_block_k: rows, columns and terms in a block of the cotangent of the left factor.
      db_block_m, db_block_n, db_block_k: the same of that of the right factor.
      vmem_limit_bytes: vector memory that either kernel may use; by default what its blocks need.
    """

    da_block_m: int = Field(default=512, gt=0, multiple_of=2 * SUBLANES)
    da_block_n: int = Field(default=512, gt=0, multiple_of=LANES)
    da_block_k: int = Field(default=512, gt=0, multiple_of=LANES)
    db_block_m: int = Field(default=512, gt=0, multiple_of=2 * SUBLANES)
    db_block_n: int = Field(default=512, gt=0, multiple_of=LANES)
    db_block_k: int = Field(default=512, gt=0, multiple_of=LANES)
    vmem_limit_bytes: int | None = Field(default=None, gt=0)


_FLOATS = {np.dtype(np.float32), np.dtype(jnp.bfloat16)}
_SIGNED = {np.dtype(np.int8), np.dtype(np.int16), np.dtype(np.int32)}
_PRESETS = {
    "DEFAULT": lax.Precision.DEFAULT,
    "BF16_BF16_F32": lax.Precision.DEFAULT,
    "BF16_BF16_F32_X3": lax.Precision.HIGH,
    "BF16_BF16_F32_X6": lax.Precision.HIGHEST,
    "F32_F32_F32": lax.Precision.HIGHEST,
}
_ELSEWHERE = "backend xla"


def unit_precision(precision: Precision) -> lax.Precision | None:
    """The precision of the matrix unit that an op's precision asks for; None for one that it does not have.

    The unit multiplies bfloat16 and sums in float32: float32 is one product (`DEFAULT`), three (`HIGH`) or six
    (`HIGHEST`). Of a pair the higher one counts for both factors.
    """
    if precision is None:
        return lax.Precision.DEFAULT
    if isinstance(precision, tuple):
        return max(cast(tuple[lax.Precision, ...], precision), key=_ORDER.index)
    return _PRESETS.get(getattr(precision, "name", ""))


def product_precision(precision: Precision) -> lax.Precision:
    """The precision of a product that is supported; integers have none, whatever is asked for."""
    return unit_precision(precision) or lax.Precision.DEFAULT


_ORDER = (lax.Precision.DEFAULT, lax.Precision.HIGH, lax.Precision.HIGHEST)


def supports_matmul(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernel cannot make this product."""
    params: MatmulParams = request.params
    given, wanted = request["a"].dtype, params.dtype
    reasons = _reject_factor(given)
    if not reasons and wanted not in _FLOATS | (_SIGNED if given.kind == "i" else set()):
        reasons.append(_reject(wanted, f"the kernel stores no {wanted}", "preferred_element_type=float32"))
    if not reasons and given.kind != "i":
        reasons += _reject_precision(params.precision)
    return reasons


def supports_matmul_vjp(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernel cannot make these cotangents."""
    params: MatmulParams = request.params
    dtypes = dict.fromkeys(spec.dtype for _, spec in request.operands)
    reasons = [reason for dtype in dtypes for reason in _reject_factor(dtype)]
    return reasons or _reject_precision(params.precision)


def _reject_factor(dtype: np.dtype[Any]) -> list[Rejection]:
    if dtype in _FLOATS or dtype == np.int8:
        return []
    integer = dtype.kind in "iub"
    hint = "astype int8, where its range does" if integer else "astype bfloat16 or float32"
    return [_reject(dtype, f"the matrix unit multiplies no {dtype}", hint)]


def _reject(dtype: np.dtype[Any], why: str, hint: str) -> Rejection:
    if dtype.itemsize == 8 or jnp.issubdtype(dtype, jnp.complexfloating):
        why = f"TPU vectors have no {dtype}"
    elif dtype == np.float16:
        why = "Mosaic loads no float16 vectors"
    return Rejection("dtype", why, f"{_ELSEWHERE}, or {hint}")


def _reject_precision(precision: Precision) -> list[Rejection]:
    if unit_precision(precision) is not None:
        return []
    hint = f"{_ELSEWHERE}, or 'default', 'high', 'highest', {', '.join(_PRESETS)}"
    return [Rejection("precision", f"the matrix unit does not compute {precision}", hint)]


def default_matmul_config(request: Request, device: Device) -> MatmulConfig:
    """Blocks by the model of `matmul_tuning`."""
    where = layout(request["a"].shape, request["b"].shape)
    if 0 in (*where.left, *where.right):
        return MatmulConfig()
    params: MatmulParams = request.params
    given = request["a"].dtype
    as_is = device.peak("s8") > device.peak("bf16")
    m, n, k = _blocks(
        (where.left, where.right, where.out), (given, given, params.dtype), params.precision, device,
        right_transposed=where.turned, int8_as_is=as_is and params.dtype.kind == "i",
    )  # fmt: skip
    return MatmulConfig(block_m=m, block_n=n, block_k=k, int8_unit=as_is)


def default_matmul_vjp_config(request: Request, device: Device) -> MatmulVjpConfig:
    """Blocks by the model of `matmul_tuning`, for each of the two products."""
    where = layout(request["a"].shape, request["b"].shape)
    if 0 in (*where.left, *where.right):
        return MatmulVjpConfig()
    params: MatmulParams = request.params
    given, d_out = request["a"].dtype, request["d_out"].dtype
    of_left = _blocks(
        (where.out, where.right, where.left), (d_out, given, given), params.precision, device,
        right_transposed=not where.turned,
    )  # fmt: skip
    shapes, dtypes = (
        ((where.out, where.left), (d_out, given)) if where.turned else ((where.left, where.out), (given, d_out))
    )
    of_right = _blocks((*shapes, where.right), (*dtypes, given), params.precision, device, left_transposed=True)
    names = [f"{which}_block_{axis}" for which in ("da", "db") for axis in "mnk"]
    return MatmulVjpConfig(**dict(zip(names, (*of_left, *of_right), strict=True)))


def _blocks(
    shapes: tuple[Shape, Shape, Shape],
    dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]],
    precision: Precision,
    device: Device,
    *,
    left_transposed: bool = False,
    right_transposed: bool = False,
    int8_as_is: bool = False,
) -> tuple[int, int, int]:
    """Rows, columns and terms of a block of a product of arrays of these shapes and dtypes: left, right and result."""
    left, right, out = shapes
    rows, terms = left[-2:][:: -1 if left_transposed else 1]
    full = math.prod(map(max, left[:-2], right[:-2]))
    kept = math.prod(out[:-2])
    pieces = count_pieces(dtypes[:2], product_precision(precision), int8_as_is)
    sizes = matmul_tuning.Sizes(
        rows=rows,
        columns=right[-2 if right_transposed else -1],
        terms=terms,
        batch=kept,
        summed=full // kept,
        itemsizes=(dtypes[0].itemsize, dtypes[1].itemsize, dtypes[2].itemsize),
        pieces=pieces,
        products=len(list(products_of_pieces(max(1, pieces[0]), max(1, pieces[1])))),
        lanes=left_transposed,
    )
    return matmul_tuning.blocks(sizes, device)

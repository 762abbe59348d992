"""What elements a product of two dtypes is made of, and what it is not made of. Imports no Pallas.

`wgmma` multiplies bfloat16, float16, float8, int8, and float32 rounded to TF32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.implementation import Rejection
from opmux.core.ops.matmul import Precision
from opmux.plugins.mosaic_gpu.matmul_terms import Terms

_F32, _BF16, _F16, _I8, _BOOL = map(np.dtype, (np.float32, jnp.bfloat16, np.float16, np.int8, np.bool_))
_F8 = tuple(map(np.dtype, (jnp.float8_e4m3fn, jnp.float8_e5m2)))
_TAKEN = (_F32, _BF16, _F16, *_F8, _I8, _BOOL)

_EXACT_INT8 = 2**31 // 2**14
"""So many products of int8 fit into the sum of 32 bits."""

_Preset = lax.DotAlgorithmPreset
_ORDERS = {
    _Preset.BF16_BF16_F32: 0, _Preset.BF16_BF16_F32_X3: 1, _Preset.BF16_BF16_F32_X6: 2, _Preset.BF16_BF16_F32_X9: 4,
    _Preset.TF32_TF32_F32_X3: 2, _Preset.F32_F32_F32: 2,
}  # fmt: skip
"""How far pairs of bfloat16 terms go to be as good as an algorithm for float32; see `Terms.order`."""

_ROUNDED = (_Preset.DEFAULT, _Preset.TF32_TF32_F32)


_ONE = Terms()


@dataclass(frozen=True)
class Elements:
    """Elements of a product.

    Attributes:
      dtype: of both operands, as `wgmma` reads them.
      terms: sums of which the operands are made.
    """

    dtype: np.dtype[Any]
    terms: Terms = _ONE

    @property
    def transposes(self) -> bool:
        """Whether `wgmma` reads an operand that does not lie along K."""
        return self.dtype.itemsize == 2


def elements(a: np.dtype[Any], b: np.dtype[Any], precision: Precision) -> Elements | None:
    """Elements of a product of two dtypes that are taken, or None where `wgmma` has none of that precision."""
    order = _order(precision)
    common = _common(a, b)
    if common == _BOOL:
        return Elements(_I8)
    if common in _F8 and order:
        return Elements(_BF16)  # sums of float8 have fewer bits than float32
    if common != _F32:
        return Elements(common)
    if order is None:
        return Elements(_F32) if _is_rounded(precision) else None
    a_terms, b_terms = (min(_terms(dtype), order + 1) for dtype in (a, b))
    return Elements(_BF16, Terms(a_terms, b_terms, order))


def _common(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    """The narrowest dtype of those taken that holds both."""
    if a == b:
        return a
    wider = max(a, b, key=lambda dtype: dtype.itemsize)
    return wider if a.itemsize != b.itemsize else _F32 if wider.itemsize == 2 else _BF16


def _order(precision: Precision) -> int | None:
    """How far pairs of terms go, or None for no pairs."""
    if isinstance(precision, tuple):
        return 2 if lax.Precision.HIGHEST in precision else None
    return _ORDERS.get(precision) if isinstance(precision, _Preset) else None


def _is_rounded(precision: Precision) -> bool:
    """Whether float32 may be rounded to TF32."""
    return precision is None or isinstance(precision, tuple) or precision in _ROUNDED


def _terms(dtype: np.dtype[Any]) -> int:
    """How many bfloat16 it takes to hold a number."""
    return {_F32: 3, _F16: 2}.get(dtype, 1)


def rejections(
    a: np.dtype[Any], b: np.dtype[Any], out: np.dtype[Any], precision: Precision, length: int
) -> list[Rejection]:
    """Reasons against a product.

    Args:
      a, b: dtypes of the operands.
      out: dtype of the result.
      precision: as the op has it.
      length: number of terms of a sum.
    """
    unknown = [dtype for dtype in dict.fromkeys((a, b)) if dtype not in _TAKEN]
    if unknown:
        return [
            Rejection("dtype", f"wgmma does not multiply {dtype.name}", "cast it, or backend xla") for dtype in unknown
        ]
    reasons: list[Rejection] = []
    other = isinstance(precision, lax.DotAlgorithm) or precision is _Preset.F64_F64_F64
    if other or elements(a, b, precision) is None:
        detail = f"wgmma has no {precision} for {_common(a, b).name}"
        reasons.append(Rejection("precision", detail, "precision None or 'highest', or backend xla"))
    if out.itemsize > 8 or (out.itemsize == 8 and out.kind != "c"):
        reasons.append(Rejection("dtype", f"{out.name}: sums have 32 bits", "backend xla"))
    if _common(a, b) == _I8 and jnp.issubdtype(out, jnp.inexact) and length >= _EXACT_INT8:
        reasons.append(
            Rejection("shape", f"a sum of {length} products of int8 may not fit into 32 bits", "backend xla")
        )
    return reasons

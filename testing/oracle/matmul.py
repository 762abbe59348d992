"""The oracle of `matmul`: a sum of products, one batch element at a time."""

from __future__ import annotations

from typing import Any

import numpy as np

from opmux.testing.oracle.add import integer_sum_dtype, kind_of, wrap


def matmul(a: Any, b: Any, *, precision: Any = None, preferred_element_type: Any = None) -> Any:
    """The product of two arrays, with the public signature of the op.

    Args:
      a: [*B, M, K] or [K].
      b: [*B, K, N] or [K].
      precision: the oracle knows one precision only.
      preferred_element_type: matters where it decides how integers wrap.

    Returns:
      bool for two booleans; int64 for integers, wrapped to the dtype of the result; else float64 or complex128.
    """
    del precision
    left, right = np.asarray(a), np.asarray(b)
    kinds = kind_of(left), kind_of(right)
    wide = np.complex128 if "complex" in kinds else np.float64 if "float" in kinds else np.int64
    left, right = left.astype(wide), right.astype(wide)
    rows = left if left.ndim > 1 else left[None, :]
    columns = right if right.ndim > 1 else right[:, None]
    batch = np.broadcast_shapes(rows.shape[:-2], columns.shape[:-2])
    rows = np.broadcast_to(rows, batch + rows.shape[-2:])
    columns = np.broadcast_to(columns, batch + columns.shape[-2:])
    out = np.zeros((*batch, rows.shape[-2], columns.shape[-1]), wide)
    for index in np.ndindex(*batch):
        out[index] = np.tensordot(rows[index], columns[index], axes=(1, 0))
    if right.ndim == 1:
        out = out[..., 0]
    if left.ndim == 1:
        out = out[..., 0, :] if right.ndim > 1 else out[..., 0]

    if wide is not np.int64:
        return out
    if preferred_element_type is not None:
        dtype = np.dtype(preferred_element_type)
        if kind_of(np.zeros((), dtype)) == "int":
            return wrap(out, 8 * dtype.itemsize, dtype.kind != "u")
        return out
    if kinds == ("bool", "bool"):
        return out > 0
    return wrap(out, *integer_sum_dtype(a, b))

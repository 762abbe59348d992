"""The oracle of `reduce`: each element of the result from the list of what is reduced to it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from opmux.testing.oracle.add import kind_of, wrap


def reduce(x: Any, *, kind: str = "sum", axis: Any = None, keepdims: bool = False, dtype: Any = None) -> Any:
    """A reduction over axes, with the public signature of the op.

    Args:
      x: any array or scalar.
      kind: `sum`, `mean`, `max`, `min` or `prod`.
      axis: an int, several, or None for all.
      keepdims: keep reduced axes.
      dtype: dtype of the result, while 64 bits are off; the elements of a sum, mean or product are cast to it.

    Returns:
      float64 or complex128, int64 (wrapped to the dtype of the result) or bool, as the result is.
    """
    x = np.asarray(x)
    axes = tuple(range(x.ndim)) if axis is None else tuple(np.atleast_1d(np.asarray(axis, int)))
    asked = _result_dtype(x, kind) if dtype is None else np.dtype(dtype)
    if kind in ("max", "min"):
        elements = _convert(x, x.dtype)
        largest = np.max if kind == "max" else np.min
        return _convert(largest(elements, axis=axes, keepdims=keepdims), asked)

    elements = _convert(x, asked)
    if elements.dtype == bool:
        combine = np.any if kind == "sum" else np.all
        return combine(elements, axis=axes, keepdims=keepdims)
    if elements.dtype == np.int64:
        elements = elements.astype(object)  # Python's integers, which do not overflow
    combine = np.prod if kind == "prod" else np.sum
    total = _convert(combine(elements, axis=axes, keepdims=keepdims), asked)
    if kind != "mean":
        return total
    count = math.prod(x.shape[number] for number in axes)
    if total.dtype == np.int64:
        return (np.sign(total) * (np.abs(total) // count)).astype(np.int64)
    with np.errstate(invalid="ignore"):
        return np.divide(total, count)


def _result_dtype(x: np.ndarray, kind: str) -> np.dtype[Any]:
    """What `jnp` reduces to while 64 bits are off."""
    if kind in ("max", "min") or kind_of(x) not in ("bool", "int"):
        return x.dtype
    if kind == "mean":
        return np.dtype(np.float32)
    return np.dtype(np.uint32 if x.dtype.kind == "u" else np.int32)


def _convert(x: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Elements as the conversion to a dtype would give them, but held in the widest dtype of its kind."""
    x = np.asarray(x)
    kind = kind_of(np.zeros((), dtype))
    if kind == "bool":
        return x != 0
    if kind == "int":
        whole = x if x.dtype.kind in "iubO" else np.trunc(x.astype(np.float64)).astype(np.int64)
        return wrap(whole, 8 * dtype.itemsize, dtype.kind != "u")
    return x.astype(np.complex128 if kind == "complex" else np.float64)

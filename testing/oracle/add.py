"""The oracle of `add`: sums in float64, or in exact integers that are wrapped afterwards."""

from __future__ import annotations

from typing import Any

import numpy as np


def add(x: Any, y: Any) -> Any:
    """The sum of two arrays, with the public signature of the op.

    Returns:
      bool for two booleans; int64 for integers, wrapped to the dtype of the result; else float64 or complex128.
    """
    kinds = kind_of(x), kind_of(y)
    if "complex" in kinds:
        return np.asarray(x).astype(np.complex128) + np.asarray(y).astype(np.complex128)
    if "float" in kinds:
        with np.errstate(invalid="ignore"):
            return np.asarray(x).astype(np.float64) + np.asarray(y).astype(np.float64)
    if kinds == ("bool", "bool"):
        return np.asarray(x) | np.asarray(y)
    exact = np.asarray(x).astype(object) + np.asarray(y).astype(object)
    return wrap(exact, *integer_sum_dtype(x, y))


def kind_of(value: Any) -> str:
    """`bool`, `int`, `float` or `complex`; unsigned integers and the dtypes that NumPy lacks included."""
    name = np.asarray(value).dtype.name
    for kind in ("bool", "complex", "float"):
        if kind in name:
            return kind
    return "int"


def integer_sum_dtype(x: Any, y: Any) -> tuple[int, bool]:
    """Bits of the dtype in which JAX adds integers while 64 bits are off, and whether it has a sign."""
    # A Python int is only as wide as what it meets.
    arrays = [value for value in (x, y) if hasattr(value, "dtype")] or [np.zeros((), np.int32)]
    arrays = [array for array in arrays if kind_of(array) == "int"] or [np.zeros((), np.int32)]
    bits = [8 * array.dtype.itemsize for array in arrays]
    signed = [not array.dtype.name.startswith("u") for array in arrays]
    widest = max(bits)
    if len(set(signed)) == 2 and max(b for b, s in zip(bits, signed, strict=True) if not s) == widest:
        widest *= 2
    return min(widest, 32), any(signed)


def wrap(exact: Any, bits: int, signed: bool) -> np.ndarray:
    """Integers of any size, modulo 2**bits, as int64."""
    low = np.asarray(exact, object) % (1 << bits)
    if signed:
        low = np.where(low >= 1 << (bits - 1), low - (1 << bits), low)
    return low.astype(np.int64)

"""How far a result may be from the float64 oracle, and why.

An error is measured against a *scale*, not against the element: a sum of products whose terms cancel is small,
but its rounding errors are as large as its terms. The scale of an element is the largest magnitude in its row
(the last axis of the array), or the root mean square of the whole array where that is larger.

* float64: 1e-12. Thousands of units in the last place, and still proof that nothing went through float32.
* float32: 5e-6, forty units: what products of the highest precision reach and TF32 (5e-4) does not.
* float16, bfloat16, float8: two units in the last place. The result is rounded once, and an intermediate, such as
  the weights of an attention, once more.
* integers and booleans: exact.

To that comes `eps(accumulator) * sqrt(length)`: rounding errors of a sum grow like a random walk. The accumulator
is float32 for inputs of 16 bits, so nothing grows with the length at the resolution of the inputs.

Gradients are products of products, so they get four times as much.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

GRADIENT_FACTOR = 4.0
"""How much more than an output a gradient may be off."""


def rtol(dtype: Any, length: int = 1) -> float:
    """Relative tolerance of a result.

    Args:
      dtype: dtype of the output, or the coarsest one among the inputs where those have a coarser one.
      length: number of terms accumulated.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return 0.0
    eps = float(jnp.finfo(dtype).eps)
    accumulator = min(eps, float(np.finfo(np.float32).eps))
    base = {"float64": 1e-12, "complex128": 1e-12, "float32": 5e-6, "complex64": 5e-6}.get(dtype.name, 2 * eps)
    return base + accumulator * length**0.5


def coarsest(arrays: Any, default: Any = np.float32) -> np.dtype[Any]:
    """The floating dtype of the fewest digits among arrays; `default` if none is floating."""
    dtypes = [np.dtype(array.dtype) for array in arrays if jnp.issubdtype(array.dtype, jnp.inexact)]
    return max(dtypes, key=lambda dtype: float(jnp.finfo(dtype).eps), default=np.dtype(default))


def assert_close(got: Any, want: Any, rtol: float, what: str, *, floor: float = 0.0, exact_zeros: bool = False) -> None:
    """Asserts that an array is as close to another as its dtype allows; NaN and infinities must be in place.

    Args:
      got: the result; its dtype decides what is representable.
      want: what it should be, of the same shape.
      rtol: allowed error relative to the scale.
      what: what is compared, for the message.
      floor: lower bound of the scale.
      exact_zeros: rows of nothing but zeros in `want` must be exactly zero.

    Raises:
      AssertionError: with the number of wrong elements and the worst of them.
    """
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    if not jnp.issubdtype(got.dtype, jnp.inexact):
        _report(got != want, np.abs(_wide(got) - _wide(want)), got, want, what, "exactly")
        return
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = _wide(want.astype(got.dtype))
        got, want = _wide(got), _wide(want)
        finite = np.isfinite(got) & np.isfinite(rounded)
        same = (got == rounded) | (np.isnan(got) & np.isnan(rounded))
        _report(~finite & ~same, np.zeros(got.shape), got, want, what, "where not finite")
        size = np.where(finite, np.abs(want), 0.0)
        row = size.max(-1, keepdims=True, initial=0.0) if size.ndim else size
        rms = (
            np.sqrt(np.mean(np.square(size / (row.max(initial=0.0) or 1.0)))) * row.max(initial=0.0) if size.size else 0
        )
        limit = rtol * np.maximum(np.maximum(row, rms), floor)
        if exact_zeros and size.ndim > 1:
            limit = np.where(row == 0, 0.0, limit)
        error = np.where(finite, np.abs(got - want), 0.0)
    _report(error > limit, error, got, want, what, f"to {rtol:.2g} of the scale")


def _wide(array: np.ndarray) -> np.ndarray:
    if array.dtype == bool or jnp.issubdtype(array.dtype, jnp.integer):
        return array.astype(np.float64)
    return array.astype(np.complex128 if jnp.issubdtype(array.dtype, jnp.complexfloating) else np.float64)


def _report(wrong: np.ndarray, error: np.ndarray, got: np.ndarray, want: np.ndarray, what: str, how: str) -> None:
    if not wrong.any():
        return
    index = np.unravel_index(np.argmax(np.where(wrong, error, -1.0)), wrong.shape)
    place = [int(i) for i in index]
    raise AssertionError(
        f"{what}: {wrong.sum()} of {wrong.size} elements are not equal {how}; the worst is {place}: "
        f"got {got[index].item()}, want {want[index].item()}"
    )

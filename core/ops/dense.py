"""What the dense ops (`add`, `matmul`, `reduce`) share: numeric operands, promotion, weak types, dtypes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.check import Checker

_NUMERIC = "a numeric or boolean dtype"


def is_numeric(dtype: Any) -> bool:
    """Whether `dtype` is boolean, integer, floating or complex, the small ML dtypes included."""
    return jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)


def numeric(check: Checker, argument: str, value: Any) -> jax.Array:
    """An array of numbers or booleans."""
    # A NumPy array of objects or strings is refused here, where the argument's name is known.
    dtype: Any = value.dtype if isinstance(value, np.ndarray | np.generic) else None
    if dtype is None or is_numeric(dtype):
        array = check.array(argument, value)
        if is_numeric(array.dtype):
            return array
        dtype = array.dtype
    raise check.error(argument, f"dtype {dtype}", _NUMERIC, type_=True)


def promote(check: Checker, names: tuple[str, str], x: jax.Array, y: jax.Array) -> tuple[np.dtype[Any], bool]:
    """The common dtype of two arrays, and whether the result is weakly typed, by JAX's promotion rules.

    Raises:
      ArgumentTypeError: JAX promotes these dtypes only when asked to, as for float8 or in strict mode.
    """
    try:
        dtype = np.dtype(jnp.result_type(x, y))
    except ValueError as error:
        raise check.error(
            names[1], f"dtype {y.dtype} with {names[0]!r} of dtype {x.dtype}", "dtypes that JAX promotes implicitly",
            f"Convert one of them with astype. ({str(error).splitlines()[0]})", type_=True,
        ) from None  # fmt: skip
    strong = [array.dtype for array in (x, y) if not array.weak_type]
    if jnp.issubdtype(dtype, jnp.inexact):
        # Weak floats lie above every integer in JAX's lattice; uint64 and int64 meet in one.
        return dtype, not any(jnp.issubdtype(each, jnp.inexact) for each in strong)
    return dtype, len(strong) < 2 and all(jnp.issubdtype(each, jnp.bool_) for each in strong)


def set_weak_type(array: jax.Array) -> jax.Array:
    """The array as a weakly typed one, as arithmetic of Python scalars gives."""
    if array.weak_type:
        return array
    bind: Any = lax.convert_element_type_p.bind  # pyright: ignore[reportUnknownMemberType]
    return bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def requested_dtype(check: Checker, argument: str, value: Any) -> np.dtype[Any]:
    """A dtype that a caller asks for; narrowed, with JAX's warning, where 64 bits are not enabled."""
    if any(value is scalar for scalar in (bool, int, float, complex)):
        return np.dtype(jnp.result_type(value))
    try:
        asked = jnp.dtype(value)
    except TypeError:
        raise check.error(argument, repr(value), _NUMERIC, type_=True) from None
    if not is_numeric(asked):
        raise check.error(argument, f"dtype {asked}", _NUMERIC, type_=True)
    if asked == jax.dtypes.canonicalize_dtype(asked):
        return asked
    # Making an array narrows the dtype, or keeps it, as JAX's settings say; and JAX words the warning.
    return np.dtype(jax.eval_shape(lambda: jnp.zeros((), asked)).dtype)


def accumulator(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Float32 for floats of fewer than 32 bits, which saturate or overflow in long sums; else the same dtype."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        return np.dtype(np.float32)
    return dtype

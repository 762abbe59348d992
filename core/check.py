"""Argument checks shared by the ops: each names the argument, what was given and what is allowed."""

from __future__ import annotations

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core.errors import ArgumentError, ArgumentTypeError


class Checker:
    """Checks the arguments of one op."""

    def __init__(self, op: str) -> None:
        self.op = op

    def error(self, argument: str, given: str, allowed: str, hint: str = "", *, type_: bool = False) -> ArgumentError:
        """The error to raise; an `ArgumentTypeError` if the type is what is wrong."""
        return (ArgumentTypeError if type_ else ArgumentError)(self.op, argument, given, allowed, hint)

    def array(self, argument: str, value: Any) -> jax.Array:
        """An array, or a scalar that JAX takes for one."""
        if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise self.error(argument, f"a {type(value).__name__}", "a JAX or NumPy array", type_=True)
        try:
            return jnp.asarray(value)
        except OverflowError:
            raise self.error(
                argument, f"the integer {value}", "one of at most 32 bits, or 64 under jax_enable_x64"
            ) from None
        except (TypeError, ValueError):
            given = f"dtype {value.dtype}" if isinstance(value, np.ndarray | np.generic) else repr(value)
            raise self.error(argument, given, "a numeric or boolean dtype", type_=True) from None

    def floating(self, argument: str, value: Any) -> jax.Array:
        """An array of a floating dtype."""
        array = self.array(argument, value)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise self.error(
                argument, f"dtype {array.dtype}", "a floating dtype (float32, bfloat16, float16, float64)", type_=True
            )
        return array

    def integer(self, argument: str, value: Any) -> jax.Array:
        """An array of an integer dtype."""
        array = self.array(argument, value)
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise self.error(argument, f"dtype {array.dtype}", "an integer dtype", type_=True)
        return array

    def number(self, argument: str, value: Any) -> float:
        """A real Python or NumPy number, as a float."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real | np.floating | np.integer):
            raise self.error(
                argument, f"a {type(value).__name__}", "a Python number",
                "It is part of what is compiled; a factor that is traced can be multiplied into an operand instead.",
                type_=True,
            )  # fmt: skip
        return float(value)

    def boolean(self, argument: str, value: Any) -> bool:
        """A Python bool."""
        if not isinstance(value, bool | np.bool_):
            raise self.error(argument, f"a {type(value).__name__}", "True or False", type_=True)
        return bool(value)

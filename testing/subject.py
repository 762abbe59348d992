"""What the kit tests: an op, something that computes it, and the oracle it has to agree with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core.cases.case import Case
from opmux.core.op import Op

Arrays = dict[str, Any]
Leaves = list[Any]


@dataclass(frozen=True)
class Subject:
    """An implementation under test.

    Attributes:
      op: the op it claims to compute.
      run: called as the op is, with arrays; what `registry.get` returns, or any other callable.
      oracle: called as the op is, with NumPy arrays; gives the results in float64.
      backend: the backend's name; empty for a callable that is no registered backend.
    """

    op: Op
    run: Callable[..., Any]
    oracle: Callable[..., Any]
    backend: str = ""

    @classmethod
    def reference(cls, op: Op, oracle: Callable[..., Any] | None = None) -> Subject:
        """The op's own reference, without any registry."""

        def run(*args: Any, **kwargs: Any) -> Any:
            call = op.call(args, kwargs)
            return call.finish(op.reference(call.request, call.operands))

        return cls(op, run, oracle or find_oracle(op.name))

    def results(self, arrays: Mapping[str, Any], rest: Mapping[str, Any]) -> Leaves:
        """The results as a flat list."""
        return jax.tree.leaves(self.run(**arrays, **rest))

    def wanted(self, arrays: Mapping[str, Any], rest: Mapping[str, Any]) -> list[np.ndarray]:
        """What the oracle says they should be."""
        return [np.asarray(leaf) for leaf in jax.tree.leaves(self.oracle(**arrays, **rest))]

    def __str__(self) -> str:
        return f"{self.op.name}[{self.backend or 'callable'}]"


def find_oracle(op: str) -> Callable[..., Any]:
    """The float64 oracle of a built-in op.

    Raises:
      LookupError: there is none; an op from elsewhere brings its own as `oracle=`.
    """
    try:
        module = importlib.import_module(f"opmux.testing.oracle.{op}")
    except ModuleNotFoundError as error:
        raise LookupError(f"no oracle for the op {op!r}: pass oracle=, a NumPy function with its signature") from error
    return getattr(module, op)


def arguments(op: Op, case: Case) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of a case by parameter, and the rest of its arguments."""
    args, kwargs = case.arguments()
    bound = op.bind(args, kwargs).arguments
    arrays = {name: value for name, value in bound.items() if isinstance(value, np.ndarray | np.generic)}
    return arrays, {name: value for name, value in bound.items() if name not in arrays}


def floating(arrays: Mapping[str, Any]) -> list[str]:
    """The arrays that gradients flow to."""
    return [name for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)]


def longest_axis(arrays: Mapping[str, Any]) -> int:
    """The longest axis of any array: a bound of how many terms most sums have."""
    return max((size for array in arrays.values() for size in np.shape(array)), default=1)

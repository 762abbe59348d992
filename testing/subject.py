"""What the kit tests: an op, something that computes it, and the oracle it has to agree with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux import registry
from opmux.core.cases.case import Case
from opmux.core.errors import ForcedBackendError
from opmux.core.op import Op
from opmux.registry import Decision, Reason

Arrays = dict[str, Any]
Leaves = list[Any]


class Rejected(Exception):
    """The backend says that it does not take a case, and why. Not a failure: the choice moves on.

    Attributes:
      reasons: the predicate's own.
    """

    def __init__(self, what: str, reasons: tuple[Reason, ...]) -> None:
        super().__init__(what, reasons)
        self.what = what
        self.reasons = reasons

    def __str__(self) -> str:
        return f"{self.what}: " + "; ".join(f"{reason.code}: {reason.detail}" for reason in self.reasons)


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
    def of(cls, op: str | Op, backend: str, oracle: Callable[..., Any] | None = None) -> Subject:
        """A registered backend, forced.

        Raises:
          UnknownOpError, UnknownBackendError: there is no such op or backend.
          LookupError: the op has no oracle, and none was given.
        """
        found = op if isinstance(op, Op) else registry.get(op).op
        return cls(found, registry.get(found.name, backend=backend), oracle or find_oracle(found.name), backend)

    @classmethod
    def reference(cls, op: Op, oracle: Callable[..., Any] | None = None) -> Subject:
        """The op's own reference, compiled, without any registry."""

        def run(*args: Any, **kwargs: Any) -> Any:
            arrays, rest = split(op, args, kwargs)
            return jax.jit(lambda arrays: run_reference(op, (), {**arrays, **rest}))(arrays)

        return cls(op, run, oracle or find_oracle(op.name))

    def decision(self, case: Case) -> Decision | None:
        """Which backend a case goes to; None for a callable that is no registered backend.

        Raises:
          Rejected: the backend does not take the case.
          AssertionError: it rejects the case without a reason, or another backend would run, or a rejected case
            does anything but raise `ForcedBackendError`.
        """
        if not self.backend:
            return None
        args, kwargs = case.arguments()
        what = f"{self} {case.name}"
        decision: Decision = registry.get(self.op.name, backend=self.backend).explain(*args, **kwargs)
        if decision.backend:
            assert decision.backend == self.backend, f"{what}: {decision.backend!r} would run instead\n{decision}"
            return decision
        candidate = decision.candidate(self.backend)
        reasons = () if candidate is None else candidate.reasons
        assert reasons, f"{what}: rejected without a reason\n{decision}"
        try:
            self.run(*args, **kwargs)
        except ForcedBackendError:
            raise Rejected(what, reasons) from None
        raise AssertionError(f"{what}: rejected, and yet it ran when forced\n{decision}")

    def results(self, arrays: Mapping[str, Any], rest: Mapping[str, Any]) -> Leaves:
        """The results as a flat list."""
        return jax.tree.leaves(self.run(**arrays, **rest))

    def wanted(self, arguments: Mapping[str, Any]) -> list[np.ndarray]:
        """What the oracle says they should be, in float64 or wider than any result."""
        with np.errstate(all="ignore"):
            return [np.asarray(leaf) for leaf in jax.tree.leaves(self.oracle(**arguments))]

    def __str__(self) -> str:
        return f"{self.op.name}[{self.backend or 'callable'}]"


def run_reference(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the op's reference gives for a call."""
    bound = op.bind(args, kwargs).arguments
    call = op.call((), bound if op.prepare is None else op.prepare(dict(bound)))
    return call.finish(op.reference(call.request, call.operands))


def quick_jit(function: Callable[..., Any]) -> Any:
    """`jax.jit`, compiled in half the time on a CPU.

    A test runs what it compiles once, on small arrays; on a CPU most of that time goes into optimizing the machine
    code. Devices with kernels of their own compile as they always do.
    """
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)


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
    """The arrays of a case by parameter, and the rest of its arguments; see `split`."""
    return split(op, *case.arguments())


def split(op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """The arrays of a call by parameter, and the rest of its arguments.

    Arrays whose values the op reads before it is traced count with the rest: transforms leave them alone.
    """
    bound = op.bind(args, kwargs).arguments
    prepared = bound if op.prepare is None else op.prepare(dict(bound))
    arrays = {
        name: value
        for name, value in bound.items()
        if isinstance(value, jax.Array | np.ndarray | np.generic) and prepared[name] is value
    }
    return arrays, {name: value for name, value in bound.items() if name not in arrays}


def floating(arrays: Mapping[str, Any]) -> list[str]:
    """The arrays that gradients flow to."""
    return [name for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.floating)]


def longest_axis(arrays: Mapping[str, Any]) -> int:
    """The longest axis of any array: a bound of how many terms most sums have."""
    return max((size for array in arrays.values() for size in np.shape(array)), default=1)

"""What an op is, apart from anything that computes it.

An op turns the arguments that users type into one canonical `Request` with canonical operands, and turns
canonical outputs back into what users expect:

    attention(q, k, v, is_causal=True)
        │ canonicalize: validate, promote, add missing axes          (plain jax.numpy, differentiable)
        ▼
    Request + operands ──► some implementation ──► outputs by name   (what a backend writes)
        │ finish: drop added axes, pick the results                  (plain jax.numpy, differentiable)
        ▼
    what the user gets

The backward of an op is an op too (`Op.vjp`), so a backend may bring its own backward kernel; its
reference is the autodiff of the forward's reference.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core import compat
from opmux.core.check import Checker
from opmux.core.config import Config, NoConfig
from opmux.core.errors import ArgumentTypeError, OpmuxError, near_matches
from opmux.core.request import ArraySpec, Operands, Outputs, Request


@dataclass(frozen=True, slots=True)
class Call:
    """A call in canonical form: what to compute, on what, and how to hand it back."""

    request: Request
    operands: Operands
    finish: Callable[[Outputs], Any]


@dataclass(frozen=True, slots=True)
class Cost:
    """Work of one request: floating-point operations and the bytes that must cross HBM at least once."""

    flops: int
    bytes: int


@dataclass(frozen=True, eq=False)
class Op:
    """An abstract op.

    Attributes:
      name: what users pass to `registry.get`.
      canonicalize: a function with the op's public signature and docstring, which returns a `Call`.
      outputs: the specs of every output of a request, by name, wanted or not.
      reference: the executable specification in plain `jax.numpy`: `(request, operands) -> outputs`,
        accumulating in float32 or wider, differentiable by JAX. Computes at least `request.wanted`.
      cost: the work of a request.
      static: parameters that are Python values rather than arrays.
      differentiable: operands that have cotangents.
      residuals: outputs of the forward that the backward reads.
      check_values: checks what only concrete values show. Called with those of `value_checked` that were
        given and are concrete, by name, and with the shapes of all array arguments.
      value_checked: parameters whose concrete values are checked.
      prepare: reads concrete arguments whose values decide shapes. Called with the bound arguments by name
        before anything is traced; returns them with such an argument replaced by a pytree that holds its
        arrays as leaves and what was read from them as static data, which `canonicalize` takes in its place.
      batch: names of the operands of a request whose leading axis is a batch that every output has too; an operand
        may have 1 there. `vmap` folds its batch into it. None where no request has one.
      config: base config schema; implementations extend it.
      cases: the op's test cases, used by every backend.
    """

    name: str
    canonicalize: Callable[..., Call]
    outputs: Callable[[Request], dict[str, ArraySpec]]
    reference: Callable[[Request, Operands], Outputs]
    cost: Callable[[Request], Cost]
    static: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    residuals: tuple[str, ...] = ()
    check_values: Callable[[Mapping[str, np.ndarray], Mapping[str, tuple[int, ...]]], None] | None = None
    value_checked: tuple[str, ...] = ()
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None
    batch: Callable[[Request], tuple[str, ...]] | None = None
    config: type[Config] = NoConfig
    cases: Callable[[], Iterable[Any]] = tuple

    @cached_property
    def signature(self) -> inspect.Signature:
        """The public signature."""
        return inspect.signature(self.canonicalize)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        """Binds a call to the signature.

        Raises:
          ArgumentTypeError: an argument is missing, unknown or given twice.
        """
        try:
            return self.signature.bind(*args, **kwargs)
        except TypeError as error:
            raise self._binding_error(args, kwargs, error) from None

    def _binding_error(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: TypeError) -> ArgumentTypeError:
        parameters = self.signature.parameters
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters.values()]
        allowed = f"{self.name}{inspect.Signature(plain)}"
        for name in kwargs:
            if name not in parameters:
                near = near_matches(name, parameters)
                hint = f"Did you mean {near[0]!r}?" if near else ""
                return ArgumentTypeError(self.name, name, "an unknown keyword", allowed, hint)
        given = [p.name for p in plain if p.kind is not p.KEYWORD_ONLY][: len(args)]
        for parameter in plain:
            if parameter.default is parameter.empty and parameter.name not in (*given, *kwargs):
                return ArgumentTypeError(self.name, parameter.name, "nothing", allowed)
        for name in given:
            if name in kwargs:
                return ArgumentTypeError(self.name, name, "two values, by place and by name", allowed)
        return ArgumentTypeError(self.name, "*", f"{len(args)} positional arguments ({error})", allowed)

    def call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """Canonicalizes a call; arrays may be tracers.

        Raises:
          ArgumentError: the op does not take these arguments.
        """
        bound = self.bind(args, kwargs)
        return self.canonicalize(*bound.args, **bound.kwargs)

    def request(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Request:
        """The request of a call whose arrays may be abstract; computes nothing."""
        bound = self.bind(args, kwargs).arguments
        arrays = {name: value for name, value in bound.items() if name not in self.static and value is not None}
        rest = {name: value for name, value in bound.items() if name not in arrays}
        found: list[Request] = []

        def record(arrays: dict[str, Any]) -> None:
            found.append(self.canonicalize(**arrays, **rest).request)

        try:
            jax.eval_shape(record, arrays)
        except OpmuxError:
            raise
        except (OverflowError, TypeError, ValueError):
            self.check_arrays(arrays)
            raise
        return found[0]

    def check_arrays(self, arguments: Mapping[str, Any]) -> None:
        """Raises an `ArgumentError` that names the first array argument whose value no array holds, if there is one."""
        for name, value in arguments.items():
            if name not in self.static and not isinstance(value, tuple | type(None) | jax.ShapeDtypeStruct):
                Checker(self.name).array(name, value)

    @cached_property
    def vjp(self) -> Op:
        """The backward as an op of its own.

        Its request holds the forward's operands, the forward outputs named in `residuals`, and one
        `d_<output>` for each output that has a cotangent; its outputs are cotangents under the names of
        the operands, in their dtypes.
        """
        forward = self

        def outputs(request: Request) -> dict[str, ArraySpec]:
            return {name: request[name] for name in request.wanted}

        def reference(request: Request, operands: Operands) -> Outputs:
            primal = forward_request(forward, request)
            fixed = {name: operands[name] for name in primal if name not in request.wanted}

            def run(moving: Operands) -> Outputs:
                results = forward.reference(primal, {**fixed, **moving})
                return {name: results[name] for name in primal.wanted}

            _, pullback = jax.vjp(run, {name: operands[name] for name in request.wanted})
            (cotangents,) = pullback({name: operands[f"d_{name}"] for name in primal.wanted})
            return cotangents

        def cost(request: Request) -> Cost:
            # Two products for each one of the forward, and the forward's own once more.
            once = forward.cost(forward_request(forward, request))
            moved = sum(spec.nbytes for _, spec in request.operands) + sum(request[n].nbytes for n in request.wanted)
            return Cost(flops=3 * once.flops, bytes=moved)

        def batch(request: Request) -> tuple[str, ...]:
            primal = forward_request(forward, request)
            leading = forward.batch(primal) if forward.batch is not None else ()
            return tuple(name for name in request if name in leading or (leading and name not in primal))

        def canonicalize(*args: Any, **kwargs: Any) -> Call:
            raise ArgumentTypeError(
                f"{forward.name}_vjp", "*", "a direct call", f"jax.vjp of registry.get({forward.name!r})"
            )

        return Op(
            name=f"{self.name}_vjp",
            canonicalize=canonicalize,
            outputs=outputs,
            reference=reference,
            cost=cost,
            differentiable=self.differentiable,
            batch=batch,
            config=self.config,
        )


def make_request(op: str, operands: Operands, params: Any, wanted: tuple[str, ...]) -> Request:
    """The request of canonical operands; notes whether they are traced under `shard_map`'s checks."""
    return Request(
        op=op,
        operands=tuple((name, ArraySpec.of(array)) for name, array in operands.items()),
        params=params,
        wanted=wanted,
        manual_axes=any(compat.has_manual_axes(array) for array in operands.values()),
    )


def forward_request(op: Op, request: Request) -> Request:
    """The forward request of `op` behind a request of its backward."""
    operands = tuple(
        (name, spec) for name, spec in request.operands if not name.startswith("d_") and name not in op.residuals
    )
    wanted = tuple(name[2:] for name in request if name.startswith("d_"))
    return dataclasses.replace(request, op=op.name, operands=operands, wanted=wanted)


def backward_request(op: Op, request: Request, wanted: Iterable[str] | None = None) -> Request:
    """The request of the backward of `op` for a forward request.

    Args:
      op: the forward op.
      request: a request of it; each output it wants has a cotangent.
      wanted: operands whose cotangents are needed; all differentiable ones by default.
    """
    specs = op.outputs(request)
    operands = (
        *request.operands,
        *((name, specs[name]) for name in op.residuals),
        *((f"d_{name}", specs[name]) for name in request.wanted),
    )
    if wanted is None:
        wanted = (
            name for name in op.differentiable if name in request and jnp.issubdtype(request[name].dtype, jnp.inexact)
        )
    return dataclasses.replace(request, op=f"{op.name}_vjp", operands=operands, wanted=tuple(wanted))

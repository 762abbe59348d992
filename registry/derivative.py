"""Forward and backward of an op as one function that JAX differentiates in reverse mode, any number of times.

first derivative    the backward of the plan
second and higher   autodiff of the reference of the backward
forward mode        an error that names a backend which has it
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from opmux.core.errors import DifferentiationError
from opmux.core.op import Op, backward_request
from opmux.core.request import Operands, Outputs, Request
from opmux.registry import tables
from opmux.registry.guard import reverse_only

Run = Callable[[Request, Operands], Outputs]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Names of the operands that are being differentiated, carried from forward to backward as structure."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class NoForwardMode:
    """The error for forward mode; looks for a way out only when it is raised."""

    op: str
    backend: str
    disabled: frozenset[str]

    def text(self) -> str:
        """What is the matter, and a backend that can."""
        plugins = tables.loader.load_all(self.disabled)
        found = [(plugin.name, plugin.implementation(self.op)) for plugin in plugins]
        able = [name for name, implementation in found if implementation is not None and implementation.forward_mode]
        way_out = (
            f'registry.get("{self.op}", backend="{able[0]}") can, and so can registry.use(backend="{able[0]}")'
            if able
            else "no backend has one"
        )
        return (
            f"{self.op}: forward-mode differentiation (jvp, jacfwd, linearize, hessian) was asked for, but backend "
            f"{self.backend!r} has a rule for reverse mode only; {way_out}."
        )


def differentiable(op: Op, forward: Run, backward: Run, message: NoForwardMode) -> Run:
    """The forward with the backward as its derivative."""

    def call(request: Request, operands: Operands) -> Outputs:
        return rule(request)(
            {name: reverse_only(array, message) if _inexact(array) else array for name, array in operands.items()}
        )

    def rule(request: Request) -> Callable[[Operands], Outputs]:
        @jax.custom_vjp
        def primal(operands: Operands) -> Outputs:
            return forward(request, operands)

        def forward_rule(marked: Mapping[str, Any]) -> tuple[Outputs, Any]:
            operands = {name: mark.value for name, mark in marked.items()}
            moving = [name for name, mark in marked.items() if mark.perturbed and _inexact(mark.value)]
            for name in moving:
                if name not in op.differentiable:
                    raise DifferentiationError(f"{op.name}: operand {name!r} has no derivative")
            needed = tuple(dict.fromkeys((*request.wanted, *op.residuals)))
            # Under the rule again, which a second derivative differentiates: it must not meet the kernel itself.
            outputs = rule(dataclasses.replace(request, wanted=needed))(operands)
            kept = {name: outputs[name] for name in op.residuals}
            wanted = tuple(name for name in op.differentiable if name in moving)
            return {name: outputs[name] for name in request.wanted}, (operands, kept, _Wanted(wanted))

        def backward_rule(saved: Any, cotangents: Mapping[str, Any]) -> tuple[dict[str, Any]]:
            operands, kept, wanted = saved
            asked = backward_request(op, request, wanted.names)
            arrays = {f"d_{name}": reverse_only(_instantiate(cotangents[name]), message) for name in request.wanted}
            found = _twice_differentiable(op, backward)(asked, {**operands, **kept, **arrays})
            return ({name: found.get(name) for name in operands},)

        primal.defvjp(forward_rule, backward_rule, symbolic_zeros=True)
        return primal

    return call


def _twice_differentiable(op: Op, backward: Run) -> Run:
    """The backward, whose own derivative is the autodiff of the reference of the backward."""

    def call(request: Request, operands: Operands) -> Outputs:
        @jax.custom_vjp
        def primal(operands: Operands) -> Outputs:
            return backward(request, operands)

        def forward_rule(operands: Operands) -> tuple[Outputs, Operands]:
            # Third derivatives differentiate this, so it calls the rule and not the kernel.
            return primal(operands), operands

        def backward_rule(operands: Operands, cotangents: Outputs) -> tuple[dict[str, Any]]:
            moving = {name: array for name, array in operands.items() if _inexact(array)}
            fixed = {name: array for name, array in operands.items() if name not in moving}
            _, pullback = jax.vjp(lambda moving: op.vjp.reference(request, {**fixed, **moving}), moving)
            (found,) = pullback(cotangents)
            return ({name: found.get(name) for name in operands},)

        primal.defvjp(forward_rule, backward_rule)
        return primal(operands)

    return call


def _instantiate(cotangent: Any) -> jax.Array:
    if isinstance(cotangent, SymbolicZero):
        zero: Any = cotangent
        return jnp.zeros(zero.shape, zero.dtype)
    return cotangent


def _inexact(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)

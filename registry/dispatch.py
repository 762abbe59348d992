"""Runs a canonical call under a plan: forward and backward as one differentiable function, staged by platform.

    user arguments ─ canonicalize ─► custom_vjp ──────────────────────────► finish ─► user's result
                                     │ forward:  kernel of the plan of each platform
                                     └ backward: kernel, or autodiff of the reference

The rule for derivatives stands around the choice of the platform, so forward and backward follow one decision.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from opmux.core.devices import Device
from opmux.core.implementation import load_target
from opmux.core.op import Op, backward_request
from opmux.core.request import ArraySpec, Operands, Outputs, Request
from opmux.registry import notices
from opmux.registry.guard import reverse_only, unavailable
from opmux.registry.resolver import REFERENCE, Choice, Plan

Run = Callable[[Request, Operands], Outputs]


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Wanted:
    """Names of the operands that are being differentiated, carried from forward to backward as structure."""

    names: tuple[str, ...]


def execute(op: Op, request: Request, operands: Operands, plans: Mapping[Device, Plan], *, staged: bool) -> Outputs:
    """Computes a request by the plans of the devices that it may run on.

    Args:
      op: the op.
      request: the request; its `wanted` outputs are returned.
      operands: the canonical operands.
      plans: one plan for each kind of device, best known first.
      staged: the device is not known before lowering, so each platform gets a branch.

    Raises:
      ResolutionError: no device has an implementation; with one that has, the others raise when lowered for.
    """
    viable = [found for found in plans.values() if found.forward is not None]
    if not viable:
        error = next(iter(plans.values())).error
        assert error is not None
        raise error
    for device, found in plans.items():
        notices.report(found, device)

    outputs = op.outputs(request)
    forward = _by_platform(op, plans, lambda found: _forward_kernel(op, found), outputs, staged)
    if all(found.forward is not None and found.forward.implementation.forward_mode for found in plans.values()):
        return forward(request, operands)
    backward = _by_platform(op.vjp, plans, lambda found: _backward_kernel(op, found), None, staged)
    return _differentiable(op, forward, backward, viable[0])(request, operands)


def _forward_kernel(op: Op, found: Plan) -> Run | None:
    return None if found.forward is None else _runner(op.name, found.forward)


def _backward_kernel(op: Op, found: Plan) -> Run | None:
    if found.forward is None:
        return None
    if found.backward is not None:
        return _runner(op.vjp.name, found.backward)

    def reference(request: Request, operands: Operands) -> Outputs:
        with jax.named_scope(f"opmux.{op.vjp.name}[{REFERENCE}]"):
            return op.vjp.reference(request, operands)

    return reference


def _runner(name: str, choice: Choice) -> Run:
    implementation = choice.implementation

    def run(request: Request, operands: Operands) -> Outputs:
        kernel = implementation.load()
        simulator = load_target(choice.simulator)() if choice.simulator else contextlib.nullcontext()
        with jax.named_scope(f"opmux.{name}[{implementation.backend}]"), simulator:
            outputs = kernel(request, operands, choice.config)
        return {wanted: outputs[wanted] for wanted in request.wanted}

    return run


def _by_platform(
    op: Op,
    plans: Mapping[Device, Plan],
    kernel_of: Callable[[Plan], Run | None],
    outputs: dict[str, ArraySpec] | None,
    staged: bool,
) -> Run:
    """One function for every device: a branch for each platform where the kernels differ."""
    by_platform: dict[str, Plan] = {}
    for device, found in plans.items():
        by_platform.setdefault(device.platform, found)
    chosen = {_identity(found) for found in by_platform.values()}
    if not staged or len(chosen) == 1:
        return next(kernel for found in plans.values() if (kernel := kernel_of(found)) is not None)

    def run_staged(request: Request, operands: Operands) -> Outputs:
        specs = op.outputs(request) if outputs is None else {name: outputs[name] for name in request.wanted}

        def branch(found: Plan) -> Callable[[Operands], Outputs]:
            kernel = kernel_of(found)
            if kernel is not None:
                return lambda operands: kernel(request, operands)
            return lambda _: unavailable(specs, str(found.error))

        branches = {platform: branch(found) for platform, found in by_platform.items()}
        where = ", ".join(branches)
        default = lambda _: unavailable(  # noqa: E731
            specs, f"{op.name} was traced for {where}; trace it inside registry.use(device=...) to lower it for another"
        )
        return lax.platform_dependent(operands, default=default, **branches)

    return run_staged


def _identity(found: Plan) -> tuple[Any, ...]:
    return (found.forward, found.backward)


def _differentiable(op: Op, forward: Run, backward: Run, found: Plan) -> Run:
    """The forward with the backward as its derivative; forward mode raises and names a backend that has it."""

    def call(request: Request, operands: Operands) -> Outputs:
        message = _no_forward_mode(op, found)
        guarded = {name: reverse_only(array, message) if _inexact(array) else array for name, array in operands.items()}
        return rule(request)(guarded)

    def rule(request: Request) -> Callable[[Operands], Outputs]:
        @jax.custom_vjp
        def primal(operands: Operands) -> Outputs:
            return forward(request, operands)

        def forward_rule(marked: Mapping[str, Any]) -> tuple[Outputs, Any]:
            operands = {name: mark.value for name, mark in marked.items()}
            wanted = tuple(name for name in op.differentiable if name in marked and marked[name].perturbed)
            needed = tuple(dict.fromkeys((*request.wanted, *op.residuals)))
            outputs = forward(dataclasses.replace(request, wanted=needed), operands)
            kept = {name: outputs[name] for name in op.residuals}
            return {name: outputs[name] for name in request.wanted}, (operands, kept, _Wanted(wanted))

        def backward_rule(saved: Any, cotangents: Mapping[str, Any]) -> tuple[dict[str, Any]]:
            operands, kept, wanted = saved
            asked = backward_request(op, request, wanted.names)
            arrays = {f"d_{name}": _instantiate(cotangents[name]) for name in request.wanted}
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
            return backward(request, operands), operands

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


def _no_forward_mode(op: Op, found: Plan) -> str:
    assert found.forward is not None
    able = notices.forward_mode_backends(op.name)
    way_out = (
        f'registry.get("{op.name}", backend="{able[0]}") can, and so can registry.use(backend="{able[0]}")'
        if able
        else "no backend has one"
    )
    return (
        f"{op.name}: forward-mode differentiation (jvp, jacfwd, linearize, hessian) was asked for, but backend "
        f"{found.forward.implementation.backend!r} has a rule for reverse mode only; {way_out}."
    )


def plans_of(devices: Sequence[Device], plan: Callable[[Device], Plan]) -> dict[Device, Plan]:
    """One plan for each device. Where a platform has several kinds of device, a plan must hold for all of them."""
    plans = {device: plan(device) for device in devices}
    for platform in {device.platform for device in devices}:
        same = [device for device in devices if device.platform == platform]
        failing = [device for device in same if plans[device].forward is None]
        if failing and len(failing) < len(same):
            plans |= dict.fromkeys(same, plans[failing[0]])
    return plans

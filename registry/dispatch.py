"""Runs a canonical call under a plan: forward and backward as one differentiable function, staged by platform.

    user arguments ─ canonicalize ─► custom_vjp ──────────────────────────► finish ─► user's result
                                     │ forward:  kernel of the plan of each platform
                                     └ backward: kernel, or autodiff of the reference

The rule for derivatives stands around the choice of the platform, so forward and backward follow one decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax import lax

from opmux.core.devices import Device
from opmux.core.errors import ForcedBackendError, OpmuxError, PluginError
from opmux.core.implementation import load_target
from opmux.core.op import Op
from opmux.core.request import ArraySpec, Operands, Outputs, Request
from opmux.core.simulation import Simulate
from opmux.registry import notices, placement
from opmux.registry.batching import batchable
from opmux.registry.candidates import Choice
from opmux.registry.derivative import NoForwardMode, Run, differentiable
from opmux.registry.guard import fresh, unavailable
from opmux.registry.policy import Policy, entered
from opmux.registry.resolver import REFERENCE, Plan

# A kernel, or the error of a platform that has none.
Kernel = Run | OpmuxError


class Planner(Protocol):
    """Plans for one device; among some backends only, if the choice has to hold for other devices as well."""

    def __call__(self, device: Device, among: frozenset[str] | None = None) -> Plan:
        """The plan."""
        ...


def plans_of(devices: Sequence[Device], plan: Planner) -> dict[Device, Plan]:
    """One plan for each device. Where a platform has several kinds of device, a choice must hold for all of them."""
    plans = {device: plan(device) for device in devices}
    for platform in {device.platform for device in devices}:
        same = [device for device in devices if device.platform == platform]
        if len({_choice(plans[device]) for device in same}) > 1:
            among = frozenset[str].intersection(*(_viable(plans[device]) for device in same))
            first = plan(same[0], among)
            # Their priorities may still differ by kind, so the first kind's choice is taken for all.
            plans |= dict.fromkeys(same, first)
    return plans


def _choice(found: Plan) -> str:
    return found.forward.implementation.backend if found.forward is not None else ""


def _viable(found: Plan) -> frozenset[str]:
    candidates = found.decision.candidates
    return frozenset(candidate.backend for candidate in candidates if candidate.state in ("selected", "viable"))


def execute(
    op: Op, request: Request, operands: Operands, plans: Mapping[Device, Plan], policy: Policy, *, staged: bool
) -> Outputs:
    """Computes a request by the plans of the devices that it may run on.

    Args:
      op: the op.
      request: the request; its `wanted` outputs are returned.
      operands: the canonical operands.
      plans: one plan for each kind of device, that of the default device first.
      policy: the policy that they were made under.
      staged: the device is not known before lowering, so each platform gets a branch.

    Raises:
      ResolutionError: no device has an implementation; with one that has, the others raise when lowered for.
    """
    first, viable = next(iter(plans.items())), [found for found in plans.values() if found.forward is not None]
    if not viable:
        assert first[1].error is not None
        raise fresh(first[1].error)
    # Of several platforms one will run; what is said is said of the one that most likely does.
    notices.report(first[1], first[0])

    forward = _by_platform(op, plans, lambda device, found: _forward_kernel(op, device, found, policy), staged)
    if all(found.forward_mode for found in plans.values()):
        return forward(request, operands)
    backward = _by_platform(op.vjp, plans, lambda device, found: _backward_kernel(op, device, found, policy), staged)
    message = NoForwardMode(op.name, _choice(viable[0]), policy.disabled)
    return differentiable(op, forward, backward, message)(request, operands)


def _forward_kernel(op: Op, device: Device, found: Plan, policy: Policy) -> Kernel:
    return _runner(op, device, found.forward, policy) if found.forward is not None else _error(found)


def _backward_kernel(op: Op, device: Device, found: Plan, policy: Policy) -> Kernel:
    if found.forward is None or found.backward_error is not None:
        return _error(found)
    if found.backward is not None:
        return _runner(op.vjp, device, found.backward, policy)

    def reference(request: Request, operands: Operands) -> Outputs:
        with jax.named_scope(f"opmux.{op.vjp.name}[{REFERENCE}]"):
            return op.vjp.reference(request, operands)

    return reference


def _error(found: Plan) -> OpmuxError:
    error = found.error or found.backward_error
    assert error is not None
    return error


def _runner(op: Op, device: Device, choice: Choice, policy: Policy) -> Run:
    implementation = choice.implementation

    def compute(request: Request, operands: Operands) -> Outputs:
        # The first call imports the kernel, while JAX traces; what its module computes then must not be traced.
        with jax.ensure_compile_time_eval():
            kernel = implementation.load()
        with jax.named_scope(f"opmux.{op.name}[{implementation.backend}]"):
            if choice.simulator:
                simulate: Simulate = load_target(choice.simulator)
                with entered(policy.traced):
                    outputs = simulate(kernel, request, operands, choice.config_for(request), policy.simulator)
            else:
                with placement.traced_for(device):
                    outputs = kernel(request, operands, choice.config_for(request))
        _check_outputs(op, implementation.backend, request, outputs)
        return {wanted: outputs[wanted] for wanted in request.wanted}

    # JAX differentiates a forward-mode kernel itself, and could not see through a rule for `vmap`.
    return compute if implementation.forward_mode else batchable(op, compute, choice.takes)


def _check_outputs(op: Op, backend: str, request: Request, outputs: Any) -> None:
    """Raises if a kernel breaks its word: a wrong dtype would otherwise surface in the user's code, or not at all."""
    who = f"backend {backend!r}: its kernel of {op.name!r}"
    if not isinstance(outputs, Mapping):
        raise PluginError(f"{who} returned a {type(outputs).__name__}, not a mapping of output names to arrays")
    specs = op.outputs(request)
    for name in request.wanted:
        if name not in outputs:
            raise PluginError(
                f"{who} left out {name!r}, which was wanted; it returned: {', '.join(outputs) or 'nothing'}"
            )
        array: Any = outputs[name]
        found = ArraySpec.of(array) if hasattr(array, "shape") and hasattr(array, "dtype") else type(array).__name__
        if found != specs[name]:
            raise PluginError(f"{who} returned {name!r} as {found}; the op says {specs[name]}")


def _by_platform(
    op: Op, plans: Mapping[Device, Plan], kernel_of: Callable[[Device, Plan], Kernel], staged: bool
) -> Run:
    """One function for every device: a branch for each platform where the kernels differ."""
    by_platform: dict[str, tuple[Device, Plan]] = {}
    for device, found in plans.items():
        by_platform.setdefault(device.platform, (device, found))
    kernels = {platform: kernel_of(device, found) for platform, (device, found) in by_platform.items()}
    if not staged or len({_identity(found) for _, found in by_platform.values()}) == 1:
        only = next(iter(kernels.values()))
        return _raising(only) if isinstance(only, OpmuxError) else only

    def run_staged(request: Request, operands: Operands) -> Outputs:
        specs = {name: spec for name, spec in op.outputs(request).items() if name in request.wanted}

        def branch(kernel: Kernel) -> Callable[[Operands], Outputs]:
            if isinstance(kernel, OpmuxError):
                return lambda _: unavailable(specs, kernel)
            return lambda operands: kernel(request, operands)

        elsewhere = ForcedBackendError(
            f"{op.name} was traced for {', '.join(kernels)}; trace it inside registry.use(device=...) to lower it "
            "for another platform"
        )
        branches = {platform: branch(kernel) for platform, kernel in kernels.items()}
        return lax.platform_dependent(operands, default=branch(elsewhere), **branches)

    return run_staged


def _raising(error: OpmuxError) -> Run:
    def run(request: Request, operands: Operands) -> Outputs:
        raise fresh(error)

    return run


def _identity(found: Plan) -> tuple[Any, ...]:
    return found.forward, found.backward, found.backward_error is not None

"""A job as a program that can be traced: the implementation's kernel on canonical operands. Runs in a child."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux import registry
from opmux.certify import targets
from opmux.certify.job import CompileJob, Workload, abstract
from opmux.core.config import Config
from opmux.core.op import Op, backward_request
from opmux.core.request import Request, short_dtype
from opmux.registry import candidates, policy


@dataclass(frozen=True)
class Program:
    """What a compiler is given: a call as users make it, since layouts and copies follow from their arrays.

        arguments ─► canonicalize ─► kernel ─► finish ─► result                      (forward)
        arguments ─► canonicalize ─┐
        residuals, cotangents ─────┴─► kernel ─► cotangents of canonical operands    (backward)

    Attributes:
      function: takes `arguments`.
      arguments: pytree of abstract arrays.
      request: what is computed.
      config: the kernel's config.
      flops: operations that the op counts for the request.
    """

    function: Callable[[Any], Any]
    arguments: Any
    request: Request
    config: Config
    flops: float


class RefusedError(Exception):
    """The implementation does not take the request; says why."""


def build(job: CompileJob) -> Program:
    """The program of a job.

    Raises:
      RefusedError: the implementation's own predicate, or its config schema, rejects it.
    """
    for module in job.plugins:
        _register(module)
    op = registry.ops()[job.op.removesuffix("_vjp")]
    arguments = given(op, job.workload)
    asked = _request(op, job, arguments)
    device = targets.target(job.target).device
    items = tuple((name, value, type(value)) for name, value in sorted(job.config.items())) or None
    found = candidates.consider(job.backend, job.op, asked, device, policy.current(), items, (job.backend,))
    assert found is not None
    if found.choice is None:
        raise RefusedError("; ".join(f"{reason.code}: {reason.detail}" for reason in found.candidate.reasons))
    kernel, config = found.choice.implementation.load(), found.choice.config
    forward = job.op == op.name
    arrays = {name: value for name, value in arguments.items() if name not in op.static}
    rest = {name: value for name, value in arguments.items() if name in op.static}
    own = () if forward else [name for name in asked if name.startswith("d_") or name in op.residuals]

    def function(abstract: tuple[dict[str, Any], dict[str, Any]]) -> Any:
        arrays, extra = abstract
        call = op.call((), {**arrays, **rest})
        outputs = kernel(asked, {**call.operands, **extra}, config)
        return call.finish(outputs) if forward else {name: outputs[name] for name in asked.wanted}

    function.__name__ = f"{job.op}_{job.backend}"
    extra = {name: struct for name, struct in asked.structs().items() if name in own}
    cost = (op if forward else op.vjp).cost(asked)
    return Program(function, (arrays, extra), asked, config, float(cost.flops))


def given(op: Op, workload: Workload) -> dict[str, Any]:
    """The arguments of a call, after what values decide has been read from them."""
    found: dict[str, Any] = {
        name: abstract(value) if isinstance(value, str) else np.asarray(value, np.int32)
        for name, value in workload.args.items()
    }
    found |= {name: _hashable(value) for name, value in workload.params.items()}
    arguments = op.bind((), found).arguments
    return op.prepare(dict(arguments)) if op.prepare is not None else dict(arguments)


def request(op: Op, job: CompileJob) -> Request:
    """The canonical request of a job's workload."""
    return _request(op, job, given(op, job.workload))


def _request(op: Op, job: CompileJob, arguments: dict[str, Any]) -> Request:
    forward = op.request((), arguments)
    return forward if job.op == op.name else backward_request(op, forward, job.workload.wanted or None)


def placed(arguments: Any, sharding: Any) -> Any:
    """Abstract arguments on a device."""

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=sharding)

    return jax.tree.map(place, arguments)


def format_of(asked: Request) -> str:
    """The dtype that decides the peak rate: that of the first floating operand, or of the first of all."""
    dtypes = [spec.dtype for _, spec in asked.operands]
    floating = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return short_dtype((floating or dtypes)[0])


def _register(module: str) -> None:
    if module not in _registered:
        registry.register(importlib.import_module(module))
        _registered.add(module)


_registered: set[str] = set()


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value

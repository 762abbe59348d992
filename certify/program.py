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
from opmux.certify.job import CompileJob, abstract
from opmux.core.config import Config
from opmux.core.op import Op, backward_request
from opmux.core.request import Request, short_dtype
from opmux.registry import candidates, policy


@dataclass(frozen=True)
class Program:
    """What a compiler is given.

    Attributes:
      function: takes the operands by name as one dictionary and returns the outputs by name.
      request: what is computed.
      config: the kernel's config.
      flops: operations that the op counts for the request.
    """

    function: Callable[[dict[str, Any]], dict[str, Any]]
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
    asked = request(op, job)
    device = targets.target(job.target).device
    items = tuple((name, value, type(value)) for name, value in sorted(job.config.items())) or None
    found = candidates.consider(job.backend, job.op, asked, device, policy.current(), items, (job.backend,))
    assert found is not None
    if found.choice is None:
        raise RefusedError("; ".join(f"{reason.code}: {reason.detail}" for reason in found.candidate.reasons))
    kernel, config = found.choice.implementation.load(), found.choice.config
    cost = (op.vjp if job.op != op.name else op).cost(asked)

    def function(operands: dict[str, Any]) -> dict[str, Any]:
        outputs = kernel(asked, operands, config)
        return {name: outputs[name] for name in asked.wanted}

    function.__name__ = f"{job.op}_{job.backend}"
    return Program(function, asked, config, float(cost.flops))


def request(op: Op, job: CompileJob) -> Request:
    """The canonical request of a job's workload."""
    given: dict[str, Any] = {
        name: abstract(value) if isinstance(value, str) else np.asarray(value, np.int32)
        for name, value in job.workload.args.items()
    }
    given |= {name: _hashable(value) for name, value in job.workload.params.items()}
    arguments = op.bind((), given).arguments
    if op.prepare is not None:
        arguments = op.prepare(dict(arguments))
    forward = op.request((), arguments)
    if job.op == op.name:
        return forward
    return backward_request(op, forward, job.workload.wanted or None)


def operands(asked: Request, sharding: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """The operands of a request as abstract arrays on a device."""
    return {name: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for name, s in asked.structs().items()}


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

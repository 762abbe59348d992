"""What a backend has registered: targets, config schemas, and predicates that tell the truth cheaply."""

from __future__ import annotations

import contextlib
import inspect
import time
from collections.abc import Generator
from unittest import mock

import jax
from pydantic import ValidationError

from opmux import registry
from opmux.core import devices
from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Implementation, Rejection
from opmux.core.op import Op, backward_request
from opmux.core.request import Request

PREDICATE_SECONDS = 500e-6
"""Most that `supports` may take; it runs once for each new request and candidate."""


def check_registration(op: Op, backend: str) -> None:
    """Checks the implementations of an op and its backward that a backend has registered.

    Kernels import and take `(request, operands, config)`; configs are frozen schemas that refuse unknown fields,
    and the default one fits; `supports` is pure and quick, touches no device, and gives reasons with a code and a
    detail; all of that for every case of the op and every declared device, present or not.

    Raises:
      AssertionError: one of these does not hold.
    """
    mine = [found for found in registry.implementations() if found.backend == backend]
    forward = [found for found in mine if found.op == op.name]
    assert len(forward) == 1, f"backend {backend!r} has {len(forward)} implementations of {op.name!r}"
    requests = [op.request(*case.arguments()) for case in op.cases()]
    check_implementation(forward[0], requests)
    for implementation in mine:
        if implementation.op == op.vjp.name:
            check_implementation(implementation, [backward_request(op, request) for request in requests])


def check_implementation(implementation: Implementation, requests: list[Request]) -> None:
    """Checks one implementation against requests of its op; see `check_registration`."""
    what = f"{implementation.op}[{implementation.backend}]"
    parameters = inspect.signature(implementation.load()).parameters
    assert len(parameters) == 3, f"{what}: the kernel takes {list(parameters)}, not (request, operands, config)"
    assert issubclass(implementation.config, Config), f"{what}: {implementation.config} is no opmux.core.config.Config"
    try:
        implementation.config(**{"no such field": 1})
    except ValidationError:
        pass
    else:
        raise AssertionError(f"{what}: the config takes unknown fields")

    for device in map(devices.device, devices.names()):
        for request in requests:
            where = f"{what} on {device.name}: {request}"
            with _no_devices():
                reasons = implementation.supports(request, device)
                assert reasons == implementation.supports(request, device), f"{where}: supports is not pure"
                config = None if reasons else implementation.config_for(request, device)
            assert all(isinstance(one, Rejection) and one.code and one.detail for one in reasons), f"{where}: {reasons}"
            if config is not None:
                assert isinstance(config, implementation.config), f"{where}: the default config is a {type(config)}"
                implementation.config.model_validate(config.model_dump())
                hash(config)
        slow = min(_seconds(implementation, requests[0], device) for _ in range(20))
        assert slow < PREDICATE_SECONDS, f"{what}: supports takes {slow * 1e6:.0f} us"


@contextlib.contextmanager
def _no_devices() -> Generator[None]:
    """Fails what asks JAX for a device."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a predicate or default config touched a device")

    names = ("devices", "local_devices", "default_backend", "device_count", "device_put", "jit")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(jax, name, refuse))
        yield


def _seconds(implementation: Implementation, request: Request, device: Device) -> float:
    start = time.perf_counter()
    implementation.supports(request, device)
    return time.perf_counter() - start

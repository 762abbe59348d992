"""The devices that a call has to be chosen for."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import jax

from opmux.core import compat, devices
from opmux.core.devices import Device
from opmux.core.errors import MixedDeviceError

_several: bool | None = None


@cache
def present() -> tuple[Device, ...]:
    """Every kind of device in this process, the default backend's first; initialises JAX's backends."""
    return tuple(dict.fromkeys(devices.from_jax(device) for device in compat.local_devices()))


def several() -> bool:
    """Whether this process has more than one kind of device, so that arrays decide by where they are."""
    global _several
    if _several is None:
        _several = len(present()) > 1
    return _several


def forget() -> None:
    """Makes the next question look at the devices again, for tests that fake them."""
    global _several
    _several = None
    present.cache_clear()


def of_arrays(op: str, leaves: Iterable[Any]) -> Device:
    """The kind of device that a call of concrete arguments runs on.

    Arrays that are committed to a device decide; JAX moves all others there, or to the default device.

    Raises:
      MixedDeviceError: they live on devices of different kinds.
    """
    found: Device | None = None
    for leaf in leaves:
        if isinstance(leaf, jax.Array) and leaf.committed:
            for device in leaf.devices():
                facts = devices.from_jax(device)
                if found is None:
                    found = facts
                elif facts is not found and facts != found:
                    where = f"{found.name} ({found.platform}), {facts.name} ({facts.platform})"
                    raise MixedDeviceError(
                        f"{op}: the arguments live on several kinds of device: {where}; move them to one."
                    )
    return devices.from_jax(compat.default_device()) if found is None else found


def of_trace() -> tuple[Device, ...]:
    """The kinds of device that a function under trace may be lowered for.

    The abstract mesh knows, if one is set; it is part of the trace's key. Else it may be any device of this
    process, since JAX traces a function once for all of them.
    """
    kind = compat.mesh_device()
    return (devices.from_jax(kind),) if kind is not None else present()


def traced_for(device: Device) -> AbstractContextManager[Any]:
    """A scope in which a kernel is traced for a device that is not in this process; of no effect for those that are.

    Without it, Pallas would take a device that is in the process for the one that the kernel is meant for. A mesh
    that the user has set says itself what it is for.
    """
    if compat.has_mesh() or device.platform in {each.platform for each in present()}:
        return nullcontext()
    return compat.traced_for(device.kind, device.platform, device.cores)

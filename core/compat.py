"""The one place where opmux bridges differences between JAX versions and reaches below its public API."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax._src.core import trace_state_clean


def has_manual_axes(array: Any) -> bool:
    """Whether an array is traced inside `shard_map` with its replication checks on.

    Interpreted Pallas kernels cannot run there: their bodies mix values that vary over the mesh with
    constants that do not.
    """
    if not isinstance(array, jax.core.Tracer):
        return False
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return kind is not None and bool(getattr(kind, "varying", ()))


def trace_is_clean() -> bool:
    """Whether no JAX transformation is being traced in this thread."""
    return trace_state_clean()


def device_platform(device: Any) -> str:
    """The platform of a device as lowering names it: `cuda` or `rocm` where JAX says `gpu`.

    Takes a `jax.Device`, whose runtime tells the two apart, or an abstract device, which has only its kind.
    """
    platform = str(device.platform)
    if platform != "gpu":
        return platform
    runtime = str(getattr(getattr(device, "client", None), "platform_version", ""))
    amd = "rocm" in runtime.lower() or re.match(r"AMD|gfx|Radeon", str(device.device_kind))
    return "rocm" if amd else "cuda"


def local_devices() -> list[jax.Device]:
    """One list of this process's devices of every platform, the default backend's first."""
    found = list(jax.local_devices())
    for platform in ("cuda", "rocm", "tpu", "cpu"):
        try:
            found += jax.local_devices(backend=platform)
        except RuntimeError:  # the platform is not present
            continue
    return found


def default_device() -> jax.Device:
    """The device that uncommitted arrays go to: `jax.default_device`, else the default backend's first."""
    chosen = jax.config.jax_default_device
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def mesh_device() -> Any | None:
    """The abstract device of the mesh that a trace runs under, if there is one."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)

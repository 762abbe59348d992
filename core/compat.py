"""The one place where opmux bridges differences between JAX versions and reaches below its public API."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import jax
import jax.core
from jax._src.core import Primitive as Primitive  # that of jax.extend.core, whose import brings Pallas
from jax._src.core import trace_state_clean

if TYPE_CHECKING:
    from jaxlib._jax import Device as JaxDevice
else:
    JaxDevice = jax.Device


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer, whose elements are not known."""
    return isinstance(value, jax.core.Tracer)


def has_manual_axes(array: Any) -> bool:
    """Whether an array is traced inside `shard_map` with its replication checks on.

    Interpreted Pallas kernels cannot run there: their bodies mix values that vary over the mesh with
    constants that do not.
    """
    if not is_traced(array):
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


def local_devices() -> list[JaxDevice]:
    """One list of this process's devices of every platform, the default backend's first."""
    found = list(jax.local_devices())
    for platform in ("cuda", "rocm", "tpu", "cpu"):
        try:
            found += jax.local_devices(backend=platform)
        except RuntimeError:  # the platform is not present
            continue
    return found


def default_device() -> JaxDevice:
    """The device that uncommitted arrays go to: `jax.default_device`, else the default backend's first."""
    chosen: Any = jax.config.values["jax_default_device"]
    if isinstance(chosen, JaxDevice):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def mesh_device() -> Any | None:
    """The abstract device of the mesh that a trace runs under, if there is one."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)

"""Facts about devices, so that choices can be made and explained for devices that are not there."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Device:
    """Declared facts of one kind of device. A figure that is not known is 0.

    Attributes:
      name: opmux's name for it (`h200`, `tpu-v6e`, `cpu`).
      platform: JAX platform (`cpu`, `cuda`, `rocm`, `tpu`).
      kind: what `jax.Device.device_kind` prints for it.
    """

    name: str
    platform: str
    kind: str = ""
    compute_capability: tuple[int, int] | None = None
    sources: tuple[str, ...] = field(default=(), compare=False)

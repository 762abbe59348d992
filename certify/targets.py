"""The devices that kernels can be compiled for without having one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opmux.core.devices import Device, device
from opmux.core.errors import UnknownDeviceError


@dataclass(frozen=True, slots=True)
class Target:
    """A device that a compiler on this machine can compile for.

    Attributes:
      name: opmux's name for the device.
      topology: what JAX's topology description calls it.
      quick: compiled for at level `quick`, unless targets are named. A device whose code is that of another is not.
      main: of the targets of a platform the one that variants of workloads are compiled for, and whose cycles are
        estimated, which takes longer than to compile; the others, if targets are named.
    """

    name: str
    topology: str
    quick: bool = True
    main: bool = False

    @property
    def device(self) -> Device:
        """Declared facts of the device."""
        return device(self.name)

    def entry(self, table: Mapping[str, int]) -> int:
        """What a table says of the target by its name or else its platform; 0 if nothing."""
        return table.get(self.name, table.get(self.platform, 0))

    @property
    def platform(self) -> str:
        """JAX platform that is lowered for."""
        return self.device.platform


TARGETS = {
    target.name: target
    for target in (
        Target("tpu-v4", "v4:2x2x1"),
        Target("tpu-v5e", "v5e:2x2"),
        Target("tpu-v5p", "v5p:2x2x1"),
        Target("tpu-v6e", "v6e:2x2", main=True),
        Target("tpu-v7x", "tpu7x:2x2x1"),
        Target("h100", "NVIDIA H100 80GB HBM3", quick=False),
        Target("h200", "NVIDIA H200", main=True),
        Target("b200", "NVIDIA B200"),
    )
}


def target(name: str) -> Target:
    """The target of this name.

    Raises:
      UnknownDeviceError: no compiler here compiles for it.
    """
    if name not in TARGETS:
        raise UnknownDeviceError(name, TARGETS, "target", "Kernels can be compiled for these devices only.")
    return TARGETS[name]

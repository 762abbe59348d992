"""What one source of preferences asks for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from opmux.core import devices
from opmux.core.compat import JaxDevice
from opmux.core.devices import Device
from opmux.core.errors import SettingError
from opmux.core.simulation import SimulatorOptions
from opmux.registry.environment import Rules, Simulate

Backend = str | Mapping[str, Any] | None


@dataclass(frozen=True)
class Settings:
    """What one source asks for; a field left empty asks for nothing.

    Attributes:
      rules: backends it forces.
      prefer: backends that automatic choice ranks first, in order.
      device: the device to choose for, instead of the one that arguments live on.
      simulate: whether a forced backend may run in a simulator of its device.
      simulator: options of the simulators.
      disable: plugins that are never used.
    """

    rules: Rules = field(default_factory=Rules)
    prefer: tuple[str, ...] = ()
    device: Device | None = None
    simulate: Simulate | None = None
    simulator: SimulatorOptions | None = None
    disable: frozenset[str] = frozenset()

    def __str__(self) -> str:
        parts = [
            f'backend="{self.rules}"' if self.rules else "",
            f"prefer={','.join(self.prefer)}" if self.prefer else "",
            f"device={self.device.name}" if self.device is not None else "",
            f"simulate={self.simulate}" if self.simulate is not None else "",
            f"simulator={self.simulator}" if self.simulator is not None else "",
            f"disable={','.join(sorted(self.disable))}" if self.disable else "",
        ]
        return " ".join(filter(None, parts)) or "none"

    @property
    def traced(self) -> Settings:
        """What of it matters when a simulated kernel is traced: whether copies are late or early is asked later."""
        return self if self.simulator is None else replace(self, simulator=replace(self.simulator, dma="on_wait"))

    def text_for(self, op: str, platform: str) -> str:
        """What of it bears on an op on a platform; empty if nothing does."""
        rule = self.rules.lookup(op, platform)
        bearing = replace(self, rules=Rules((rule,) if rule is not None else ()))
        return "" if bearing == NOTHING else str(bearing)


NOTHING = Settings()


def device_of(device: str | Device | JaxDevice | None) -> Device | None:
    """Device facts from a name, from facts, or from a JAX device; None for none.

    Raises:
      UnknownDeviceError: no device has this name.
      SettingError: it is none of those.
    """
    if device is None or isinstance(device, Device):
        return device
    if isinstance(device, str):
        return devices.device(device) if device else None
    if not hasattr(device, "device_kind"):
        raise SettingError(f"device: got a {type(device).__name__}; allowed: a name, a jax.Device, or Device facts")
    return devices.from_jax(device)

"""What a backend registers: plain, frozen data about kernels that are imported only when chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from opmux.core.config import Config, NoConfig
from opmux.core.devices import Device
from opmux.core.request import Operands, Outputs, Request

API_VERSION = (1, 0)
"""Version of the plugin interface: a plugin with another major version is refused."""

Kernel = Callable[[Request, Operands, Config], Outputs]
Tier = Literal["kernel", "interpret", "reference"]


@dataclass(frozen=True, slots=True)
class Rejection:
    """One reason why an implementation cannot take a request.

    Attributes:
      code: stable word to test for, such as `dtype`, `shape`, `platform`, `capability`, `feature`, `config`.
      detail: what is the matter, with the figures.
      hint: what the caller could do about it.
    """

    code: str
    detail: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a backend says of itself.

    Attributes:
      name: the backend's name; the loader checks that it is the name of its entry point.
      summary: one line for listings.
      platforms: JAX platforms it runs on (`cpu`, `cuda`, `rocm`, `tpu`); empty means every platform.
      tier: `kernel` for real kernels of a device, `interpret` for interpreted ones, `reference` for plain XLA.
      simulator: `"package.module:function"` that runs a kernel in a simulator of the backend's device, on a CPU;
        see `opmux.core.simulation.Simulate`. Empty where there is none.
      install_hint: how to get what the backend needs.
      api_version: the plugin interface it was written for.
    """

    name: str
    summary: str = ""
    platforms: tuple[str, ...] = ()
    tier: Tier = "kernel"
    simulator: str = ""
    install_hint: str = ""
    api_version: tuple[int, int] = API_VERSION


def _supports_everything(request: Request, device: Device) -> list[Rejection]:
    return []


def _no_priority() -> Mapping[str, int]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Implementation:
    """One kernel of one op.

    Attributes:
      op: name of the op (`attention`), or of its backward (`attention_vjp`).
      kernel: `"package.module:function"`, imported when first chosen, or in a notebook the function itself;
        its signature is `(request, operands, config) -> {output name: array}` and it returns at least
        `request.wanted`.
      supports: `(request, device) -> [Rejection, ...]`; empty means viable. Pure and fast; touches no device.
      config: schema of the kernel's config.
      default_config: `(request, device) -> config`; `config()` if not given.
      priority: by device name (`h200`), platform (`cuda`) or `*`, the narrowest entry counts; higher is
        preferred; 0 if none matches.
      priority_for: `(request, device) -> priority` for the requests on which it depends on more than the device; None
        for the others. Pure and fast, as `supports`.
      forward_mode: JAX can differentiate the kernel itself, in both modes, so it needs no backward.
      backend: filled in by the loader.
      builtin: filled in by the loader: the implementation comes from opmux's own distribution.
    """

    op: str
    kernel: str | Kernel
    supports: Callable[[Request, Device], list[Rejection]] = _supports_everything
    config: type[Config] = NoConfig
    default_config: Callable[[Request, Device], Config] | None = None
    priority: Mapping[str, int] = field(default_factory=_no_priority)
    priority_for: Callable[[Request, Device], int | None] | None = None
    forward_mode: bool = False
    backend: str = ""
    builtin: bool = False

    def priority_on(self, device: Device, request: Request | None = None) -> int:
        """Priority on a device, for a request if one is given."""
        if self.priority_for is not None and request is not None:
            found = self.priority_for(request, device)
            if found is not None:
                return found
        for key in (device.name, device.platform, "*"):
            if key in self.priority:
                return self.priority[key]
        return 0

    def narrowness_on(self, device: Device) -> int:
        """How narrowly the priority table names a device: 2 by its name, 1 by its platform, else 0."""
        return 2 if device.name in self.priority else 1 if device.platform in self.priority else 0

    def config_for(self, request: Request, device: Device) -> Config:
        """The config used when the caller gives none."""
        return self.config() if self.default_config is None else self.default_config(request, device)

    def load(self) -> Kernel:
        """The kernel, imported if need be."""
        return load_target(self.kernel) if isinstance(self.kernel, str) else self.kernel

    def __hash__(self) -> int:
        return hash((self.op, self.backend, self.kernel))


def load_target(target: str) -> Any:
    """Imports what a `"package.module:attribute"` string names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)

"""The registry: which implementation of an op runs, and why.

    from opmux import registry

    out = registry.get("attention")(q, k, v, is_causal=True)
    print(registry.explain("attention", q, k, v, is_causal=True))

    with registry.use(backend="xla"):
        ...

Importing this module imports no plugin and no kernel, and touches no device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from opmux.core.compat import JaxDevice
from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.errors import SettingError
from opmux.core.implementation import BackendInfo, Implementation, Rejection
from opmux.core.op import Op
from opmux.registry import environment as _environment
from opmux.registry import policy as _policy
from opmux.registry import tables as _tables
from opmux.registry.candidates import Options
from opmux.registry.decision import Candidate, Decision, Reason
from opmux.registry.handle import OpHandle
from opmux.registry.hookspecs import hookimpl
from opmux.registry.loader import Plugin, PluginFailure
from opmux.registry.policy import Backend, configure
from opmux.registry.scope import carry, use

__all__ = [
    "BackendInfo", "Candidate", "Config", "Decision", "Implementation", "Op", "OpHandle", "Plugin", "PluginFailure",
    "Reason", "Rejection", "backends", "carry", "configure", "explain", "failures", "get", "hookimpl",
    "implementations", "ops", "register", "unregister", "use",
]  # fmt: skip

_handles: dict[Any, OpHandle] = {}


def get(
    op: str,
    *,
    backend: Backend = None,
    device: str | Device | JaxDevice | None = None,
    config: Config | Mapping[str, Any] | None = None,
) -> OpHandle:
    """The op of this name, ready to be called.

    The implementation is chosen when the handle is called, not here.

    Args:
      op: name of the op.
      backend: forces a backend for this op: a name, several names to try in order (`"mosaic_gpu,xla"`), or rules as
        `OPMUX_BACKEND` spells them. A forced backend runs or raises; it never falls back.
      device: the device to choose for (`h200`, `tpu-v6e`, a `jax.Device`), instead of the one that the arguments
        live on. It may be absent: lower for it, or explain.
      config: the kernel's config, or a mapping of fields to override in its default one.

    Raises:
      UnknownOpError, UnknownBackendError, UnknownDeviceError: a name means nothing.
      SettingError: an argument or environment variable has a value that it cannot have.
    """
    wanted = _policy.current()
    key = op if backend is None and device is None and config is None else _key(op, backend, device, config)
    handle = _handles.get(key)
    if handle is None:
        handle = _handles.setdefault(key, _handle(op, backend, device, config, wanted.disabled))
    return handle


def _key(op: str, backend: Any, device: Any, config: Any) -> Any:
    where = f"get({op!r})"
    if isinstance(backend, Mapping):
        backend = str(_environment.rules_from(backend, f"{where}(backend=...)"))
    config = _items(config, where) if isinstance(config, Mapping) else config
    key = (op, backend, device, config)
    try:
        hash(key)
    except TypeError:
        raise SettingError(
            f"{where}: backend, device and config must be hashable; got {backend!r}, {device!r}, {config!r}"
        ) from None
    return key


def _items(config: Mapping[str, Any], where: str) -> tuple[tuple[str, Any, type], ...]:
    for name in config:
        if not isinstance(name, str):
            raise SettingError(f"{where}: config: got the field {name!r}; allowed: names of fields")
    # With the type, since 1 and True are equal.
    return tuple(sorted(((name, value, type(value)) for name, value in config.items()), key=lambda item: item[0]))


def _handle(op: str, backend: Any, device: Any, config: Any, disabled: frozenset[str]) -> OpHandle:
    where = f"get({op!r})"
    if not isinstance(op, str):
        raise SettingError(f"{where}: got a {type(op).__name__}; allowed: the name of an op")
    _tables.op(op, where, disabled)
    asked = _policy.settings(where, backend=backend, device=device)
    if config is not None and not isinstance(config, Config | Mapping):
        raise SettingError(f"{where}: config: got a {type(config).__name__}; allowed: a Config, or a mapping of fields")
    kept = _items(config, where) if isinstance(config, Mapping) else config
    return OpHandle(op, Options(rules=asked.rules, config=kept, device=asked.device))


def explain(op: str, *args: Any, **kwargs: Any) -> Decision:
    """Which implementation a call would get, and why. Runs nothing.

    Args:
      op: name of the op.
      *args: arguments of the op; arrays or `jax.ShapeDtypeStruct`s.
      **kwargs: likewise. `registry.get(op, backend=..., device=..., config=...).explain(...)` explains a call that
        gives those.

    Returns:
      A `Decision`: `print` it, or take `.model_dump_json()`. If nothing can run the call, its `backend` is empty.
    """
    return get(op).explain(*args, **kwargs)


def ops() -> dict[str, Op]:
    """Every op by name, with those of plugins."""
    return _tables.ops(_policy.current().disabled)


def backends() -> dict[str, BackendInfo]:
    """Every backend that loads, by name. See `failures` for those that do not."""
    plugins = _tables.loader.load_all(_policy.current().disabled)
    return {plugin.name: plugin.contents.info for plugin in plugins if plugin.contents.info is not None}


def implementations(op: str | None = None) -> list[Implementation]:
    """Every implementation that is registered, or those of one op, by backend.

    Raises:
      UnknownOpError: there is no such op.
    """
    disabled = _policy.current().disabled
    if op is not None:
        _tables.op(op.removesuffix("_vjp"), "implementations()", disabled)
    plugins = _tables.loader.load_all(disabled)
    found = [implementation for plugin in plugins for implementation in plugin.contents.implementations]
    return [implementation for implementation in found if op is None or implementation.op == op]


def failures() -> list[PluginFailure]:
    """Every plugin that failed to load or conflicts with another, with its traceback."""
    _tables.loader.load_all(_policy.current().disabled)
    return _tables.loader.failures()


def register(plugin: Any, name: str | None = None) -> str:
    """Adds a plugin to this process: a module or object whose functions are marked with `hookimpl`.

    Args:
      plugin: the plugin.
      name: its name; what its `opmux_backend` hook says by default.

    Returns:
      The name.

    Raises:
      PluginConflictError: the name is taken.
      PluginValidationError: what it registers is malformed; nothing of it is kept.
    """
    found = _tables.loader.register(plugin, name)
    _policy.plugins_changed()
    return found


def unregister(name: str) -> None:
    """Removes a plugin from this process.

    Raises:
      PluginError: no plugin of this name is loaded.
    """
    _tables.loader.unregister(name)
    _handles.clear()
    _policy.plugins_changed()

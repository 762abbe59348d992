"""Checks what a plugin registers, before any of it is used."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, get_args

import pluggy

from opmux.core.config import Config
from opmux.core.errors import PluginValidationError
from opmux.core.implementation import API_VERSION, BackendInfo, Implementation, Tier
from opmux.core.op import Op
from opmux.registry import environment, hookspecs

_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_RESERVED = {
    environment.AUTO: "ends a forcing in OPMUX_BACKEND",
    "reference": "stands for autodiff of an op's reference",
}
_TARGET = re.compile(r"[\w.]+:[\w.]+")


@dataclass(frozen=True)
class Contents:
    """What a plugin registers."""

    info: BackendInfo | None
    implementations: tuple[Implementation, ...]
    ops: tuple[Op, ...]
    rank: Callable[..., Any] | None


def name_of(plugin: Any) -> str:
    """The name a plugin object gives itself."""
    backend = getattr(plugin, "opmux_backend", None)
    if backend is None:
        raise PluginValidationError(
            f"plugin {plugin!r} has no opmux_backend hook; give a name, or add "
            "`@hookimpl def opmux_backend(): return BackendInfo(name)`"
        )
    try:
        info = backend()
    except (Exception, SystemExit) as cause:
        raise PluginValidationError(
            f"plugin {plugin!r}: opmux_backend raised {type(cause).__name__}: {cause}"
        ) from cause
    if not isinstance(info, BackendInfo):
        raise PluginValidationError(
            f"plugin {plugin!r}: opmux_backend returned a {type(info).__name__}, not a BackendInfo"
        )
    return info.name


def refuse_name(name: Any) -> None:
    """Raises if OPMUX_BACKEND could not name a plugin of this name."""
    if not isinstance(name, str) or not environment.NAME.fullmatch(name):
        raise PluginValidationError(
            f"plugin {name!r}: a name is letters, digits, '_', '-' and '.', a letter or '_' first"
        )
    if name in _RESERVED:
        raise PluginValidationError(f"plugin {name!r}: the name is taken: it {_RESERVED[name]}")


def refuse_unknown_hooks(manager: pluggy.PluginManager, plugin: Any, name: str) -> None:
    """Raises if a hook is misspelt: pluggy alone would never call it, and nobody would know."""
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginValidationError(f"plugin {name!r}: {error}") from error
    known = [hook for hook in dir(hookspecs) if hook.startswith("opmux_")]
    for attribute in dir(plugin):
        if attribute.startswith("opmux_") and attribute not in known:
            raise PluginValidationError(
                f"plugin {name!r}: {attribute!r} is no hook of opmux; hooks: {', '.join(known)}"
            )


def caller_of(impl: pluggy.HookImpl) -> Callable[..., Any]:
    """One hook of a plugin as a function of keywords, of which it gets those that it declares."""
    if impl.wrapper or impl.hookwrapper:
        raise PluginValidationError(
            f"plugin {impl.plugin_name!r}: {impl.function.__name__} is a wrapper of other plugins' hooks"
        )
    return lambda **given: impl.function(*(given[name] for name in impl.argnames))


def collect(name: str, hooks: dict[str, Callable[..., Any]], *, builtin: bool) -> Contents:
    """Calls the hooks of one plugin and checks what they return."""
    if not hooks:
        raise PluginValidationError(f"plugin {name!r} has no hooks; mark its functions with `opmux.registry.hookimpl`")
    info = hooks["opmux_backend"]() if "opmux_backend" in hooks else None
    if "opmux_backend" in hooks:
        _check_info(name, info)
    implementations: list[Implementation] = []
    for implementation in _items(name, hooks, "opmux_implementations", Implementation):
        if any(implementation.op == known.op for known in implementations):
            raise PluginValidationError(f"plugin {name!r} registers {implementation.op!r} twice")
        _check_implementation(name, implementation)
        implementations.append(replace(implementation, backend=name, builtin=builtin))
    if implementations and info is None:
        raise PluginValidationError(f"plugin {name!r} registers implementations but has no opmux_backend hook")
    ops = tuple(_items(name, hooks, "opmux_ops", Op))
    for op in ops:
        if not re.fullmatch(r"[A-Za-z_]\w*", op.name) or op.name.endswith("_vjp"):
            raise PluginValidationError(f"plugin {name!r}: op name {op.name!r} is no identifier, or ends in '_vjp'")
    return Contents(info, tuple(implementations), ops, hooks.get("opmux_rank"))


def _check_info(name: str, info: Any) -> None:
    _expect(name, "opmux_backend", info, BackendInfo)
    if info.name != name:
        raise PluginValidationError(f"plugin {name!r}: its opmux_backend says its name is {info.name!r}")
    version = info.api_version
    if not isinstance(version, tuple) or len(version) != 2 or version[0] != API_VERSION[0]:
        raise PluginValidationError(
            f"plugin {name!r} was written for plugin interface {version}, this is {API_VERSION}; "
            "a version of it for this opmux is needed"
        )
    if not isinstance(info.platforms, tuple) or any(platform not in _PLATFORMS for platform in info.platforms):
        raise PluginValidationError(
            f"plugin {name!r}: platforms: got {info.platforms!r}; allowed: a tuple of {', '.join(_PLATFORMS)}"
        )
    if info.tier not in get_args(Tier):
        raise PluginValidationError(f"plugin {name!r}: tier: got {info.tier!r}; allowed: {', '.join(get_args(Tier))}")
    if info.simulator and not _TARGET.fullmatch(info.simulator):
        raise PluginValidationError(f"plugin {name!r}: simulator {info.simulator!r} is no 'package.module:function'")


def _check_implementation(name: str, implementation: Implementation) -> None:
    op, kernel = implementation.op, implementation.kernel
    if not callable(kernel) and not (isinstance(kernel, str) and _TARGET.fullmatch(kernel)):
        raise PluginValidationError(
            f"plugin {name!r}: kernel {kernel!r} of {op!r} is no 'package.module:function', nor a function"
        )
    if not isinstance(implementation.config, type) or not issubclass(implementation.config, Config):
        raise PluginValidationError(f"plugin {name!r}: config of {op!r} is no subclass of opmux.core.config.Config")
    priority = implementation.priority
    if not isinstance(priority, Mapping) or not all(isinstance(value, int) for value in priority.values()):
        raise PluginValidationError(
            f"plugin {name!r}: priority of {op!r}: got {priority!r}; allowed: device name to int"
        )
    if implementation.priority_for is not None and not callable(implementation.priority_for):
        raise PluginValidationError(f"plugin {name!r}: priority_for of {op!r} is no function of (request, device)")
    if not callable(implementation.supports):
        raise PluginValidationError(f"plugin {name!r}: supports of {op!r} is no function of (request, device)")


def _items(name: str, hooks: Mapping[str, Callable[..., Any]], hook: str, kind: type) -> list[Any]:
    if hook not in hooks:
        return []
    found = hooks[hook]()
    if not isinstance(found, Iterable):
        raise PluginValidationError(
            f"plugin {name!r}: {hook} gave a {type(found).__name__}, not a list of {kind.__name__}"
        )
    items = list(found)
    for item in items:
        _expect(name, hook, item, kind)
    return items


def _expect(name: str, hook: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise PluginValidationError(f"plugin {name!r}: {hook} gave a {type(value).__name__}, not a {kind.__name__}")

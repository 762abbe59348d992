"""Checks what a plugin registers, before any of it is used."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pluggy

from opmux.core.errors import PluginValidationError
from opmux.core.implementation import API_VERSION, BackendInfo, Implementation
from opmux.core.op import Op
from opmux.registry import hookspecs


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
    info = backend()
    if not isinstance(info, BackendInfo):
        raise PluginValidationError(
            f"plugin {plugin!r}: opmux_backend returned a {type(info).__name__}, not a BackendInfo"
        )
    return info.name


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


def collect(name: str, hooks: dict[str, Callable[..., Any]], *, builtin: bool) -> Contents:
    """Calls the hooks of one plugin and checks what they return."""
    if not hooks:
        raise PluginValidationError(f"plugin {name!r} has no hooks; mark its functions with `opmux.registry.hookimpl`")
    info = hooks["opmux_backend"]() if "opmux_backend" in hooks else None
    if info is not None:
        _expect(name, "opmux_backend", info, BackendInfo)
        if info.name != name:
            raise PluginValidationError(f"plugin {name!r}: its opmux_backend says its name is {info.name!r}")
        if info.api_version[0] != API_VERSION[0]:
            raise PluginValidationError(
                f"plugin {name!r} was written for plugin interface {info.api_version}, this is {API_VERSION}"
            )
    implementations: list[Implementation] = []
    seen: set[str] = set()
    for implementation in hooks["opmux_implementations"]() if "opmux_implementations" in hooks else ():
        _expect(name, "opmux_implementations", implementation, Implementation)
        if implementation.op in seen:
            raise PluginValidationError(f"plugin {name!r} registers {implementation.op!r} twice")
        seen.add(implementation.op)
        if isinstance(implementation.kernel, str) and not re.fullmatch(r"[\w.]+:[\w.]+", implementation.kernel):
            raise PluginValidationError(
                f"plugin {name!r}: kernel {implementation.kernel!r} of {implementation.op!r} "
                "is no 'package.module:function'"
            )
        implementations.append(replace(implementation, backend=name, builtin=builtin))
    if implementations and info is None:
        raise PluginValidationError(f"plugin {name!r} registers implementations but has no opmux_backend hook")
    ops = tuple(hooks["opmux_ops"]()) if "opmux_ops" in hooks else ()
    for op in ops:
        _expect(name, "opmux_ops", op, Op)
    return Contents(info, tuple(implementations), ops, hooks.get("opmux_rank"))


def _expect(name: str, hook: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise PluginValidationError(f"plugin {name!r}: {hook} gave a {type(value).__name__}, not a {kind.__name__}")

"""Imports plugins, each one in isolation, and keeps every failure as data.

    entry points ─► de-duplicate ─► OPMUX_DISABLE ─► import ─► validate ─► pluggy ─► Plugin
                       │                │              │          │
                       ▼                ▼              ▼          ▼
                    conflict        not imported     PluginFailure, quoted by errors, explain and doctor

A plugin is imported when its backend is asked for by name, or when a choice has to consider every backend.
"""

from __future__ import annotations

import importlib.metadata
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import pluggy

from opmux.core.errors import (
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginValidationError,
    PluginWarning,
)
from opmux.core.implementation import Implementation
from opmux.core.ops import builtin_ops
from opmux.registry import discovery, hookspecs, validate
from opmux.registry.discovery import Found, PluginFailure
from opmux.registry.guard import fresh


@dataclass(frozen=True)
class Plugin:
    """A plugin that was imported and validated."""

    name: str
    found: Found
    contents: validate.Contents
    seconds: float

    @property
    def tier(self) -> str:
        """Tier of its backend."""
        return self.contents.info.tier if self.contents.info is not None else ""

    def implementation(self, op: str) -> Implementation | None:
        """Its implementation of an op, if it has one."""
        return next((found for found in self.contents.implementations if found.op == op), None)


class Loader:
    """The plugins of this process. Safe to use from several threads."""

    def __init__(self, entry_points: Callable[[], Iterable[importlib.metadata.EntryPoint]] | None = None) -> None:
        self._entry_points = entry_points or discovery.entry_points
        self._lock = threading.RLock()
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._found: dict[str, Found] | None = None
        self._plugins: dict[str, Plugin] = {}
        self._failures: dict[str, PluginFailure] = {}
        self._conflicts: list[PluginFailure] = []
        self._loading: set[str] = set()

    def discover(self) -> dict[str, Found]:
        """Every plugin by name, in the order of the names; imports none of them."""
        with self._lock:
            if self._found is None:
                # Stored in one go: a discovery that raises is tried again instead of leaving a half-filled table.
                self._found, self._conflicts = discovery.discover(self._entry_points())
                nobody = [conflict for conflict in self._conflicts if conflict.name not in self._found]
                self._failures.update((conflict.name, conflict) for conflict in nobody)
                for conflict in self._conflicts:
                    _warn(conflict)
            return self._found

    def load(self, name: str, *, strict: bool = False) -> Plugin | PluginFailure | None:
        """The plugin of this name, imported if it was not yet; None if there is none.

        Raises:
          PluginError: the plugin failed and `strict` is set.
        """
        with self._lock:
            found = self.discover().get(name)
            if name in self._loading:  # it uses opmux while it is imported, so it is not there yet
                return None
            if name not in self._plugins and name not in self._failures and found is not None:
                self._loading.add(name)
                try:
                    # The choice may be made while JAX traces; what a module computes on import must not be traced.
                    with jax.ensure_compile_time_eval():
                        self._load(found, strict=strict)
                finally:
                    self._loading.discard(name)
            failure = self._failures.get(name)
            if failure is not None and strict:
                raise fresh(failure.error)
            return self._plugins.get(name) or failure

    def load_all(self, disabled: frozenset[str], *, strict: bool = False) -> list[Plugin]:
        """Every plugin that loads, in the order of the names, except the disabled ones."""
        names = [name for name in self.names() if name not in disabled]
        loaded = [self.load(name, strict=strict) for name in names]
        return [plugin for plugin in loaded if isinstance(plugin, Plugin)]

    def loaded(self) -> list[Plugin]:
        """The plugins that are loaded already, in the order of the names."""
        with self._lock:
            return [self._plugins[name] for name in sorted(self._plugins)]

    def names(self) -> list[str]:
        """Names of every plugin, loaded or not, failed or not."""
        with self._lock:
            return sorted({*self.discover(), *self._plugins, *self._failures})

    def failures(self) -> list[PluginFailure]:
        """Every failure so far, by name."""
        with self._lock:
            kept = [conflict for conflict in self._conflicts if conflict.name in self.discover()]
            return sorted([*self._failures.values(), *kept], key=str)

    def register(self, plugin: Any, name: str | None = None) -> str:
        """Adds a plugin object and returns its name.

        Raises:
          PluginError: it is malformed, or its name is taken.
        """
        with self._lock:
            if name is None:
                name = validate.name_of(plugin)
            if name in self.names():
                raise PluginConflictError(
                    f"a plugin named {name!r} exists already ({self._origin(name)}); unregister it, or rename yours"
                )
            if (known := self._manager.get_name(plugin)) is not None:
                raise PluginConflictError(f"plugin {name!r} is registered already, under the name {known!r}")
            found = Found(name, "", "", getattr(plugin, "__name__", type(plugin).__name__), lambda: plugin)
            self._plugins[name] = self._validate(found, plugin, time.perf_counter())
            return name

    def unregister(self, name: str) -> None:
        """Removes a plugin from this process, or the record of one that failed.

        Raises:
          PluginError: there is no plugin of this name.
        """
        with self._lock:
            if self.load(name) is None:
                raise PluginError(f"no plugin is named {name!r}; there are: {', '.join(self.names()) or 'none'}")
            if self._plugins.pop(name, None) is not None:
                self._manager.unregister(name=name)
            self._failures.pop(name, None)
            self.discover().pop(name, None)

    def _origin(self, name: str) -> str:
        plugin = self._plugins.get(name)
        if plugin is not None:
            return str(plugin.found)
        failure = self._failures.get(name)
        return f"{failure.found}, which failed" if failure is not None else str(self.discover()[name])

    def _load(self, found: Found, *, strict: bool) -> None:
        start = time.perf_counter()
        try:
            plugin = found.load()
        except (Exception, SystemExit) as cause:
            error = PluginLoadError(f"plugin {found.name!r} could not be imported from {found}")
            error.__cause__ = cause
            self._fail(_failure(found, "import", error, start), warn=not strict)
            return
        try:
            self._plugins[found.name] = self._validate(found, plugin, start)
        except PluginError as error:
            self._fail(_failure(found, "validate", error, start), warn=not strict)

    def _fail(self, failure: PluginFailure, *, warn: bool) -> None:
        self._failures[failure.name] = failure
        if warn:
            _warn(failure)

    def _validate(self, found: Found, plugin: Any, start: float) -> Plugin:
        """Reads and checks what a plugin registers; leaves nothing behind if it is malformed."""
        name = found.name
        try:
            validate.refuse_name(name)
            self._register(plugin, name)
            callers = self._manager.get_hookcallers(plugin) or []
            hooks = {
                caller.name: validate.caller_of(impl)
                for caller in callers
                for impl in caller.get_hookimpls()
                if impl.plugin_name == name
            }
            validate.refuse_unknown_hooks(self._manager, plugin, name)
            contents = validate.collect(name, hooks, builtin=found.builtin)
            self._refuse_taken_ops(name, contents)
        except PluginError:
            self._roll_back(name)
            raise
        except (Exception, SystemExit) as cause:
            self._roll_back(name)
            raise PluginValidationError(f"plugin {name!r}: a hook raised {type(cause).__name__}: {cause}") from cause
        except BaseException:
            self._roll_back(name)
            raise
        return Plugin(name, found, contents, time.perf_counter() - start)

    def _register(self, plugin: Any, name: str) -> None:
        try:
            self._manager.register(plugin, name)
        except (pluggy.PluginValidationError, ValueError) as cause:
            raise PluginValidationError(f"plugin {name!r}: {cause}") from cause

    def _roll_back(self, name: str) -> None:
        # pluggy keeps a plugin whose hooks it refused itself, but only some of its hooks.
        if self._manager.has_plugin(name):
            self._manager.unregister(name=name)

    def _refuse_taken_ops(self, name: str, contents: validate.Contents) -> None:
        taken = {op.name: plugin.name for plugin in self._plugins.values() for op in plugin.contents.ops}
        taken |= dict.fromkeys(builtin_ops(), discovery.OWN)
        for op in contents.ops:
            if op.name in taken:
                raise PluginConflictError(
                    f"plugin {name!r} adds an op named {op.name!r}, which {taken[op.name]!r} has already"
                )


def _failure(found: Found, stage: str, error: PluginError, start: float) -> PluginFailure:
    text = "".join(traceback.format_exception(error.__cause__ or error))
    return PluginFailure(found.name, found, stage, error, text, time.perf_counter() - start)


def _warn(failure: PluginFailure) -> None:
    warnings.warn(f"opmux plugin not loaded: {failure}", PluginWarning, stacklevel=2)


__all__ = ["Found", "Loader", "Plugin", "PluginFailure"]

"""Finds plugins, imports each one in isolation, and keeps every failure as data.

    entry points ─► de-duplicate ─► OPMUX_DISABLE ─► import ─► validate ─► pluggy ─► Plugin
                       │                │              │          │
                       ▼                ▼              ▼          ▼
                    conflict        not imported     PluginFailure, quoted by errors, explain and doctor

Discovery reads metadata only. A plugin is imported when its backend is asked for by name, or when a choice has
to consider every backend. The order is by name, whatever `sys.path` or the file system says.
"""

from __future__ import annotations

import importlib.metadata
import re
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

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
from opmux.registry import hookspecs, validate

GROUP = "opmux"
_OWN = "opmux"


@dataclass(frozen=True)
class Found:
    """An entry point that was found, before any import.

    Attributes:
      name: the plugin's name, which is its backend's.
      dist: normalised name of the distribution; empty for one registered in this process.
      version: version of the distribution.
      value: `package.module` or `package.module:attribute`.
      load: imports the plugin and returns it.
    """

    name: str
    dist: str
    version: str
    value: str
    load: Callable[[], Any] = field(compare=False, repr=False)

    @property
    def builtin(self) -> bool:
        """Whether opmux itself ships it."""
        return self.dist == _OWN

    def __str__(self) -> str:
        origin = f"{self.dist} {self.version}".strip()
        return f"{self.value} ({origin})" if origin else self.value


@dataclass(frozen=True)
class PluginFailure:
    """Why a plugin is not usable.

    Attributes:
      name: the plugin's name.
      found: where it comes from.
      stage: `import`, `validate` or `conflict`.
      error: the exception, with its cause and traceback.
      traceback: the traceback as text.
      seconds: how long the attempt took.
    """

    name: str
    found: Found
    stage: str
    error: PluginError
    traceback: str = ""
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """One line: the root cause first."""
        cause = self.error.__cause__
        return str(self.error) if cause is None else f"{type(cause).__name__}: {cause}"

    def __str__(self) -> str:
        return f"{self.name}: {self.reason} [{self.stage}; {self.found}]"


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
        self._entry_points = entry_points or (lambda: importlib.metadata.entry_points(group=GROUP))
        self._lock = threading.RLock()
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._found: dict[str, Found] | None = None
        self._plugins: dict[str, Plugin] = {}
        self._failures: dict[str, PluginFailure] = {}
        self._conflicts: list[PluginFailure] = []

    def discover(self) -> dict[str, Found]:
        """Every plugin by name, in the order of the names; imports none of them."""
        with self._lock:
            if self._found is None:
                found, conflicts = _discover(self._entry_points())
                for conflict in conflicts:
                    self._fail(conflict)
                # Stored last: a discovery that raises is tried again instead of leaving a half-filled table.
                self._found = found
            return self._found

    def load(self, name: str, *, strict: bool = False) -> Plugin | PluginFailure | None:
        """The plugin of this name, imported if it was not yet; None if there is none.

        Raises:
          PluginError: the plugin failed and `strict` is set.
        """
        with self._lock:
            found = self.discover().get(name)
            if name not in self._plugins and name not in self._failures and found is not None:
                self._load(found)
            failure = self._failures.get(name)
            if failure is not None and strict:
                raise failure.error
            return self._plugins.get(name) or failure

    def load_all(self, disabled: frozenset[str], *, strict: bool = False) -> list[Plugin]:
        """Every plugin that loads, in the order of the names, except the disabled ones."""
        names = [name for name in self.names() if name not in disabled]
        loaded = [self.load(name, strict=strict) for name in names]
        return [plugin for plugin in loaded if isinstance(plugin, Plugin)]

    def names(self) -> list[str]:
        """Names of every plugin, loaded or not, failed or not."""
        with self._lock:
            return sorted({*self.discover(), *self._plugins, *self._failures})

    def failures(self) -> list[PluginFailure]:
        """Every failure so far, by name."""
        with self._lock:
            self.discover()
            return sorted([*self._failures.values(), *self._conflicts], key=lambda failure: str(failure))

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
                    f"a plugin named {name!r} exists already ({self._origin(name)}); unregister it first"
                )
            found = Found(name, "", "", getattr(plugin, "__name__", type(plugin).__name__), lambda: plugin)
            self._plugins[name] = self._validate(found, plugin, time.perf_counter())
            return name

    def unregister(self, name: str) -> None:
        """Removes a plugin from this process.

        Raises:
          PluginError: there is no loaded plugin of this name.
        """
        with self._lock:
            if self.load(name) is None or name not in self._plugins:
                raise PluginError(f"no plugin named {name!r} is loaded; loaded: {', '.join(sorted(self._plugins))}")
            self._manager.unregister(name=name)
            found = self._plugins.pop(name).found
            if found.dist:
                self.discover().pop(name, None)

    def _origin(self, name: str) -> str:
        plugin = self._plugins.get(name)
        return str(plugin.found if plugin is not None else self.discover().get(name, name))

    def _fail(self, failure: PluginFailure) -> None:
        if failure.stage == "conflict":
            self._conflicts.append(failure)
        if failure.stage != "conflict" or not failure.found.builtin:
            self._failures.setdefault(failure.name, failure)
        warnings.warn(f"opmux plugin not loaded: {failure}", PluginWarning, stacklevel=2)

    def _load(self, found: Found) -> None:
        start = time.perf_counter()
        try:
            plugin = found.load()
        except (Exception, SystemExit) as cause:
            error = PluginLoadError(f"plugin {found.name!r} could not be imported from {found}")
            error.__cause__ = cause
            self._fail(_failure(found, "import", error, start))
            return
        try:
            self._plugins[found.name] = self._validate(found, plugin, start)
        except PluginError as error:
            self._fail(_failure(found, "validate", error, start))

    def _validate(self, found: Found, plugin: Any, start: float) -> Plugin:
        """Reads and checks what a plugin registers; leaves nothing behind if it is malformed."""
        name = found.name
        self._manager.register(plugin, name)
        try:
            hooks = {
                caller.name: next(impl.function for impl in caller.get_hookimpls() if impl.plugin_name == name)
                for caller in self._manager.get_hookcallers(plugin) or ()
            }
            validate.refuse_unknown_hooks(self._manager, plugin, name)
            contents = validate.collect(name, hooks, builtin=found.builtin)
            self._refuse_taken_ops(name, contents)
        except PluginError:
            self._manager.unregister(name=name)
            raise
        except (Exception, SystemExit) as cause:
            self._manager.unregister(name=name)
            raise PluginValidationError(f"plugin {name!r}: a hook raised {type(cause).__name__}: {cause}") from cause
        return Plugin(name, found, contents, time.perf_counter() - start)

    def _refuse_taken_ops(self, name: str, contents: validate.Contents) -> None:
        taken = {op.name: plugin.name for plugin in self._plugins.values() for op in plugin.contents.ops}
        taken |= dict.fromkeys(builtin_ops(), _OWN)
        for op in contents.ops:
            if op.name in taken:
                raise PluginConflictError(
                    f"plugin {name!r} adds an op named {op.name!r}, which {taken[op.name]!r} has already"
                )


def _discover(
    entry_points: Iterable[importlib.metadata.EntryPoint],
) -> tuple[dict[str, Found], list[PluginFailure]]:
    """Plugins by name, and a failure for each name that two different entry points claim."""
    by_name: dict[str, set[Found]] = {}
    for point in entry_points:
        dist = point.dist
        found = Found(
            name=point.name,
            dist=_normalise(dist.name) if dist is not None else "",
            version=dist.version if dist is not None else "",
            value=point.value.strip(),
            load=point.load,
        )
        # An editable install, or a lib64 that links to lib, lists the same entry point twice.
        by_name.setdefault(point.name, set()).add(found)
    plugins: dict[str, Found] = {}
    conflicts: list[PluginFailure] = []
    for name, claims in sorted(by_name.items()):
        ordered = sorted(claims, key=lambda found: (found.dist, found.value, found.version))
        distinct = list({(found.dist, found.value): found for found in ordered}.values())
        own = [found for found in distinct if found.builtin]
        if len(distinct) == 1 or len(own) == 1:
            plugins[name] = own[0] if own else distinct[0]
        losers = [found for found in distinct if found is not plugins.get(name)]
        if losers:
            everyone = ", ".join(map(str, distinct))
            verdict = f"{plugins[name]} is kept" if name in plugins else "none of them is used"
            error = PluginConflictError(
                f"{len(distinct)} plugins are named {name!r}: {everyone}; {verdict}. Uninstall all but one."
            )
            conflicts.append(PluginFailure(name, own[0] if own else losers[0], "conflict", error))
    return plugins, conflicts


def _normalise(dist: str) -> str:
    return re.sub(r"[-_.]+", "-", dist).lower()


def _failure(found: Found, stage: str, error: PluginError, start: float) -> PluginFailure:
    text = "".join(traceback.format_exception(error.__cause__ or error))
    return PluginFailure(found.name, found, stage, error, text, time.perf_counter() - start)


__all__ = ["Found", "Loader", "Plugin", "PluginFailure"]

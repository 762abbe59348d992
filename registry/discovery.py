"""Finds plugins by their entry points: metadata only, nothing is imported.

The order is by name, whatever `sys.path` or the file system says.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from opmux.core.errors import PluginConflictError, PluginError

GROUP = "opmux"
OWN = "opmux"


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
        return self.dist == OWN

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


def entry_points() -> Iterable[importlib.metadata.EntryPoint]:
    """The entry points of every installed distribution."""
    return importlib.metadata.entry_points(group=GROUP)


def discover(points: Iterable[importlib.metadata.EntryPoint]) -> tuple[dict[str, Found], list[PluginFailure]]:
    """Plugins by name, and a failure for each name that several entry points claim with different values.

    A built-in plugin keeps its name; between others nobody wins, since any rule would depend on the order in which
    they were installed.
    """
    by_name: dict[str, list[Found]] = {}
    for point in points:
        dist, version = _origin(point)
        found = Found(name=point.name, dist=dist, version=version, value=point.value.strip(), load=point.load)
        by_name.setdefault(point.name, []).append(found)
    plugins: dict[str, Found] = {}
    conflicts: list[PluginFailure] = []
    for name, claims in sorted(by_name.items()):
        # An editable install, a lib64 that links to lib, or stale metadata lists one and the same plugin twice.
        ordered = sorted(claims, key=lambda found: (not found.builtin, found.dist, found.value, found.version))
        distinct = list({found.value: found for found in reversed(ordered)}.values())[::-1]
        if len(distinct) == 1 or distinct[0].builtin:
            plugins[name] = distinct[0]
        if len(distinct) > 1:
            everyone = ", ".join(map(str, distinct))
            verdict = f"{plugins[name]} is kept" if name in plugins else "none of them is used"
            error = PluginConflictError(
                f"{len(distinct)} plugins are named {name!r}: {everyone}; {verdict}. Uninstall all but one."
            )
            conflicts.append(PluginFailure(name, distinct[0], "conflict", error))
    return plugins, conflicts


def _origin(point: importlib.metadata.EntryPoint) -> tuple[str, str]:
    """Normalised name and version of the distribution behind an entry point."""
    dist = point.dist
    if dist is None:
        return "", ""
    try:
        name, version = str(dist.name or ""), str(dist.version or "")
    except (TypeError, KeyError, AttributeError, OSError, importlib.metadata.PackageNotFoundError):
        # What an interrupted uninstall leaves behind has entry points, but no metadata to read a name from.
        name = version = ""
    return re.sub(r"[-_.]+", "-", name).lower() or "unknown-distribution", version

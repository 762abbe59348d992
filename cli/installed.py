"""Installed distributions that have opmux plugins, and those that keep Python from seeing one."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

GROUP = "opmux"


@dataclass(frozen=True)
class Copy:
    """One installed copy of a distribution.

    Attributes:
      name: normalised name, taken from the file name where the metadata are empty.
      version: its version, or empty.
      place: the folder that holds it.
      points: its plugins, as `(name, value)`.
    """

    name: str
    version: str
    place: str
    points: frozenset[tuple[str, str]]

    def __str__(self) -> str:
        return f"{self.name} {self.version or '(no metadata)'} in {self.place}"


def shadowed(distributions: Iterable[metadata.Distribution] | None = None) -> list[tuple[Copy, Copy]]:
    """Pairs of copies of one distribution where the first on the path hides the second, which has plugins.

    Python reads the first copy only, be it stale or empty, as a half-removed installation leaves it. A second copy
    that says the same, as a build leaves it in a source tree, hides nothing.
    """
    seen: dict[str, Copy] = {}
    found: list[tuple[Copy, Copy]] = []
    for distribution in metadata.distributions() if distributions is None else distributions:
        copy = _copy(distribution)
        first = seen.setdefault(copy.name, copy)
        same = (first.version, first.points) == (copy.version, copy.points)
        if copy.points and copy.place != first.place and not same:
            found.append((first, copy))
    return found


def _copy(distribution: metadata.Distribution) -> Copy:
    path = Path(getattr(distribution, "_path", "") or "")
    stem = path.stem.partition("-")[0]
    try:
        found = distribution.metadata
        name, version = (found[key] if key in found else "" for key in ("Name", "Version"))  # noqa: SIM401
    except Exception:  # newer Pythons raise where there are no metadata
        name, version = "", ""
    points = frozenset((point.name, point.value) for point in distribution.entry_points if point.group == GROUP)
    normal = re.sub(r"[-_.]+", "-", name or stem).lower()
    return Copy(normal, version, str(path.parent), points)

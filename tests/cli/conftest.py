from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from opmux.registry import environment, policy, tables
from opmux.registry.loader import Loader

PLUGIN = """
from opmux.core.implementation import BackendInfo, Implementation
from opmux.registry import hookimpl

@hookimpl
def opmux_backend():
    return BackendInfo({name!r}, summary="made for a test", platforms={platforms!r}, tier="kernel")

@hookimpl
def opmux_implementations():
    return [Implementation(op="add", kernel={kernel!r}, priority={priority!r})]
"""


@pytest.fixture
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, and none of the variables that the suite itself may run under."""
    monkeypatch.setenv("COLUMNS", "80")
    for name in environment.VARIABLES:
        monkeypatch.delenv(name, raising=False)


Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with one plugin, as pip would, and makes this process look for plugins anew."""

    def put(
        name: str,
        source: str | None = None,
        *,
        dist: str = "",
        version: str = "1.0",
        kernel: str = "opmux.plugins.xla.reference:add",
        priority: dict[str, int] | None = None,
        platforms: tuple[str, ...] = (),
        place: str = "site",
    ) -> Path:
        dist = dist or name
        site = tmp_path / place
        info = site / f"{dist}-{version}.dist-info"
        info.mkdir(parents=True)
        module = f"{dist}_plugin_{tmp_path.name.replace('-', '_')}"
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[opmux]\n{name} = {module}\n")
        if source is None:
            source = PLUGIN.format(name=name, kernel=kernel, priority=priority or {}, platforms=platforms)
        (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(site)
        monkeypatch.setattr(tables, "loader", Loader())
        policy.plugins_changed()
        return info

    yield put
    monkeypatch.undo()
    policy.plugins_changed()

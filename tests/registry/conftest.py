import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # kernels of the fakes are imported by name

import fakes

from opmux.core import compat
from opmux.registry import placement, policy, tables
from opmux.registry.loader import Loader


@pytest.fixture(autouse=True)
def no_entry_points(isolated_registry, monkeypatch):
    """The tests register their own plugins; those that want the installed ones say so."""
    monkeypatch.setattr(tables, "loader", Loader(tuple))


@pytest.fixture
def installed(monkeypatch):
    """The plugins that are installed, opmux's own among them."""
    monkeypatch.setattr(tables, "loader", Loader())


@pytest.fixture
def entry_points(monkeypatch):
    """Makes the given entry points the installed ones."""

    def install(*points):
        loader = Loader(lambda: points)
        monkeypatch.setattr(tables, "loader", loader)
        policy.plugins_changed()
        return loader

    return install


@pytest.fixture
def process_with(monkeypatch):
    """Makes this process one that has the given devices, the default one first; they are names of `opmux.core.devices`.

    Each stands on a CPU device of its own: arrays committed to `fakes.jax_device(name)` live on the fake one.
    """

    def fake(*names):
        monkeypatch.setattr(placement.devices, "from_jax", fakes.pretend(names))
        monkeypatch.setattr(compat, "local_devices", lambda: fakes.standing_for(names))
        monkeypatch.setattr(compat, "default_device", lambda: fakes.standing_for(names)[0])
        placement.forget()

    yield fake
    placement.forget()

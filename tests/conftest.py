"""What every test shares: eight CPU devices, room for programs, and a registry that a test may do anything to."""

import gc
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before JAX starts: sharding, and processes with several kinds of device, are tested on these.
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()


_tests = itertools.count(1)
_MAPPINGS = Path("/proc/self/maps")
_MOST_MAPPINGS = 25_000
"""Of the 65,530 that Linux gives a process by default. Programs take some, and what compiles when there are no more
crashes."""


def pytest_runtest_teardown() -> None:
    """Drops compiled programs before there are too many."""
    if next(_tests) % 20 == 0 and _MAPPINGS.exists():
        with _MAPPINGS.open("rb") as lines:
            mappings = sum(1 for _ in lines)
        if mappings > _MOST_MAPPINGS:
            import jax

            jax.clear_caches()
            gc.collect()


@pytest.fixture
def isolated_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A registry as a new process finds it: no policy, no notices given, no plugin imported, no variable set."""
    from opmux import registry
    from opmux.registry import environment, notices, placement, policy, tables
    from opmux.registry.loader import Loader

    def forget() -> None:
        notices.forget()
        placement.forget()
        policy._root.restore()

    for variable in environment.VARIABLES:
        monkeypatch.setenv(variable, "")  # noted, so that whatever a test leaves in it is taken back
        monkeypatch.delenv(variable)
    ambient = policy._context.get_global()
    monkeypatch.setattr(policy, "_process", policy._Process())
    monkeypatch.setattr(tables, "loader", Loader())
    monkeypatch.setattr(registry, "_handles", {})
    policy._context.set_global(None)
    forget()
    yield
    assert policy.scopes().get() == (), "the test left a scope open"
    forget()
    policy._context.set_global(ambient)

"""Files of benchmarks as modules."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def part(monkeypatch):
    """Imports a file of the benchmarks."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module

"""What tests of certification share."""

from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
TOYS = Path(__file__).parent / "toys"


@pytest.fixture
def sample():
    """Reads a sample of what compilers dump."""
    return lambda name: (DATA / name).read_text()


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    """Makes the plugin of toy kernels importable, here and in children, and gives the cache a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(TOYS)
        patch.setenv("OPMUX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield

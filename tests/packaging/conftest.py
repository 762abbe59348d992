import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED = shutil.ignore_patterns(
    ".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "benchmarks", "docs", "examples"
)


def _run(*command, cwd, **env):
    """Runs a command outside of the tree, without the settings that the suite may run under."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPMUX_", "PYTHONPATH"))}
    found = subprocess.run(
        list(map(str, command)), cwd=cwd, env={**kept, "JAX_PLATFORMS": "cpu", **env}, capture_output=True, text=True
    )
    assert found.returncode == 0, f"{command}\n{found.stdout}\n{found.stderr}"
    return found.stdout


def _pip(*arguments, cwd):
    return _run(sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments, cwd=cwd)


@pytest.fixture(scope="session")
def run():
    return _run


@pytest.fixture(scope="session")
def pip():
    return _pip


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """A wheel of opmux, built from a copy of the tree."""
    work = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, work / "tree", ignore=SKIPPED)
    _pip("wheel", "--no-deps", "--wheel-dir", work, work / "tree", cwd=work)
    (built,) = work.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def fresh_python(wheel, tmp_path_factory):
    """The interpreter of an environment with that wheel; JAX and the rest are lent by the one that runs the suite."""
    work = tmp_path_factory.mktemp("fresh")
    _run(sys.executable, "-m", "venv", "--without-pip", work / "venv", cwd=work)
    python = work / "venv" / "bin" / "python"
    _pip("--python", python, "install", "--no-deps", "--no-index", wheel, cwd=work)
    site = _run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work).strip()
    lent = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    # A path that is added so is not searched for .pth files, so an editable opmux in there is not found.
    Path(site, "lent.pth").write_text("\n".join(lent) + "\n")
    return python

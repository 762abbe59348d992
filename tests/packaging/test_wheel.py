"""A wheel built from the tree works without the tree."""

import json
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("core", "registry", "plugins", "certify", "testing", "cli")


def test_the_wheel_holds_every_file_of_the_rooms_and_nothing_else(wheel):
    files = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"opmux/{name}" for name in files} == {name for name in names if ".dist-info/" not in name}
    assert {f"opmux/{room}/py.typed" for room in ("core", "registry")} <= names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_its_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    text = archive.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    required = {
        line.split()[1].split(">")[0]
        for line in text.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    }
    assert required == {"jax", "jaxlib", "numpy", "pluggy", "pydantic"}


def test_it_works_in_a_fresh_environment(fresh_python, run, tmp_path):
    out = run(
        fresh_python, "-c", """
import json, warnings
warnings.simplefilter("error")
import jax, numpy
from opmux import core, registry
x = numpy.ones((1, 8, 2, 16), numpy.float32)
print(json.dumps({
    "where": registry.__file__,
    "sum": float(registry.get("add")(1.0, 2.0)),
    "attention": registry.get("attention")(x, x, x, is_causal=True).shape,
    "forced": [float(registry.get("add", backend=name)(1.0, 2.0)) for name in ("interpret", "xla")],
    "backends": list(registry.backends()),
    "failures": [str(failure) for failure in registry.failures()],
}))
""", cwd=tmp_path,
    )  # fmt: skip
    found = json.loads(out)
    assert found["where"].startswith(str(fresh_python.parents[1]))
    assert found["sum"] == 3
    assert found["attention"] == [1, 8, 2, 16]
    assert {"interpret", "xla"} <= set(found["backends"])
    assert set(found["forced"]) == {3}
    assert found["failures"] == []
    assert list(tmp_path.iterdir()) == []


def test_its_command_works(fresh_python, run, tmp_path):
    assert "opmux" in run(fresh_python.parent / "opmux", "version", cwd=tmp_path)

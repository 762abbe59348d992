from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from opmux.cli import installed
from opmux.cli.main import main
from opmux.core.implementation import Implementation

pytestmark = pytest.mark.usefixtures("plain_terminal")

Install = Callable[..., Path]

BROKEN = """
def deep(depth):
    if depth == 0:
        raise OSError("libfoo.so.1: cannot open shared object file: No such file or directory")
    deep(depth - 1)

deep(3)
"""


def doctor(capsys: pytest.CaptureFixture[str]) -> tuple[int, str, dict[str, Any]]:
    """Exit code, text, which must fit 80 columns, and the JSON document."""
    code = main(["doctor"])
    out, err = capsys.readouterr()
    assert max(map(len, out.splitlines())) <= 80, out
    assert err == ""
    assert main(["doctor", "--json"]) == code
    return code, out, json.loads(capsys.readouterr().out)


def findings(found: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [finding for finding in found["findings"] if finding["check"] == check]


def test_a_sound_installation_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, found = doctor(capsys)
    assert code == 0
    assert found["ok"]
    assert {"interpret", "xla"} <= {plugin["name"] for plugin in found["plugins"] if plugin["state"] == "ok"}
    assert found["devices"][0] == "cpu"
    assert "all is well" in out


def test_a_plugin_that_loads_is_listed(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme", version="2.3", priority={"cpu": 90})
    code, out, found = doctor(capsys)
    assert code == 0
    plugin = next(plugin for plugin in found["plugins"] if plugin["name"] == "acme")
    assert plugin["implementations"] == 1
    assert "(acme 2.3)" in plugin["origin"]
    assert "acme" in out
    assert main(["list"]) == 0
    assert "90 *" in capsys.readouterr().out


def test_a_broken_plugin_is_shown_with_the_end_of_its_traceback(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("acme", BROKEN)
    code, out, found = doctor(capsys)
    assert code == 1
    (finding,) = findings(found, "import")
    assert finding["subject"] == "acme"
    assert finding["detail"].startswith("OSError: libfoo.so.1")
    assert "deep(3)" in finding["traceback"]
    assert "raise OSError" in out
    assert "1 check failed" in out
    assert next(plugin["state"] for plugin in found["plugins"] if plugin["name"] == "acme") == "failed"


def test_a_broken_plugin_does_not_hide_the_others(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme", BROKEN)
    for argv in (["list"], ["explain", "add", "--arg", "x=f32[8]", "--arg", "y=f32[8]"]):
        assert main(argv) == 0
        out, err = capsys.readouterr()
        assert "acme" in out
        assert "libfoo.so.1" in out
        assert "xla" in out
        assert err == ""
        assert max(map(len, out.splitlines())) <= 80


def test_a_disabled_plugin_is_not_imported(
    install: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", BROKEN)
    monkeypatch.setenv("OPMUX_DISABLE", "acme")
    code, out, found = doctor(capsys)
    assert code == 0
    assert {"name": "acme", "state": "disabled"} in found["plugins"]
    assert "libfoo" not in out
    assert main(["list"]) == 0
    assert "disabled  acme" in capsys.readouterr().out


def test_a_malformed_plugin(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme", "x = 1\n")
    code, _, found = doctor(capsys)
    assert code == 1
    (finding,) = findings(found, "validate")
    assert "acme" in finding["detail"]


def test_two_plugins_of_one_name(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme", dist="acme_one")
    install("acme", dist="acme_two")
    code, out, found = doctor(capsys)
    assert code == 1
    (finding,) = findings(found, "conflict")
    assert "acme-one" in finding["detail"]
    assert "acme-two" in finding["detail"]
    assert "conflict" in out


def test_a_third_party_cannot_take_a_built_in_name(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("xla", dist="usurper")
    code, _, found = doctor(capsys)
    assert code == 1
    assert "usurper" in findings(found, "conflict")[0]["detail"]
    assert next(plugin["state"] for plugin in found["plugins"] if plugin["name"] == "xla") == "ok"


def test_a_kernel_that_is_not_there(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme", kernel="acme_no_such_module:add")
    code, out, found = doctor(capsys)
    assert code == 1
    (finding,) = findings(found, "kernel")
    assert finding["subject"] == "acme: add"
    assert "acme_no_such_module:add: ModuleNotFoundError" in finding["detail"]
    assert "FAILED  kernel" in out


def test_a_wrong_variable_is_a_finding(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPMUX_BACKEND", "attention@cud=xla")
    code, _, found = doctor(capsys)
    assert code == 1
    assert "column 11" in findings(found, "environment")[0]["detail"]
    assert {"interpret", "xla"} <= {plugin["name"] for plugin in found["plugins"]}


def test_stale_metadata_that_hide_a_plugin(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    info = install("acme", place="good")
    stale = install("acme", version="0.9", place="stale")  # put before the good one on the path
    for name in ("METADATA", "entry_points.txt"):
        (stale / name).unlink()
    code, out, found = doctor(capsys)
    assert code == 1
    (finding,) = findings(found, "metadata")
    assert str(info.parent) in finding["detail"]
    assert "and with it the plugins acme" in finding["detail"]
    assert "acme" in out


def test_an_older_copy_of_the_same_plugin_is_a_note(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme", version="0.9", place="old")
    install("acme", version="1.0", place="new")
    code, out, found = doctor(capsys)
    assert code == 0
    (finding,) = findings(found, "metadata")
    assert finding["failed"] is False
    assert "acme 1.0 in" in finding["detail"]
    assert "hides acme 0.9 in" in finding["detail"]
    assert "all is well, 1 note" in out


def test_the_same_folder_twice_on_the_path_hides_nothing(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    info = install("acme")
    monkeypatch.syspath_prepend(info.parent)
    assert not [pair for pair in installed.shadowed() if pair[1].name == "acme"]


def test_doctor_in_a_process_of_its_own(install: Install) -> None:
    info = install("acme", BROKEN)
    done = subprocess.run(
        [sys.executable, "-m", "opmux.cli", "doctor"],
        env={**os.environ, "PYTHONPATH": str(info.parent)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "libfoo.so.1" in done.stdout
    assert "Traceback" not in done.stderr


def test_list_fits_with_many_backends(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(12):
        install(f"backend_number_{i:02}", place=f"site{i}", priority={"*": i})
    install("elsewhere", platforms=("tpu",), place="tpu")
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "backend_number_11" in out
    assert "away" in out
    assert main(["list", "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["ops"]["add"]
    assert cells["elsewhere"] == {"state": "away", "priority": 0, "backward": False}
    assert len(cells) >= 14


def test_what_an_absent_device_needs_is_a_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain installation has no absl, which Mosaic GPU imports."""
    monkeypatch.setattr(Implementation, "load", _lacking_absl)
    code, out, found = doctor(capsys)
    (finding, *_) = [one for one in findings(found, "kernel") if one["subject"].startswith("mosaic_gpu")]
    assert not finding["failed"]
    assert "absl-py" in finding["detail"]
    assert {plugin["name"]: plugin["state"] for plugin in found["plugins"]}["mosaic_gpu"] == "lacking"
    # A backend that runs here has no such excuse.
    assert any(one["failed"] for one in findings(found, "kernel") if one["subject"].startswith("interpret"))
    assert code == 1
    assert "absl" in out


def _lacking_absl(implementation: Implementation) -> None:
    raise ModuleNotFoundError("No module named 'absl'", name="absl")

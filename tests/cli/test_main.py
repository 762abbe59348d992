from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from opmux.cli.main import main
from opmux.core import devices

pytestmark = pytest.mark.usefixtures("plain_terminal")

ADD = ["explain", "add", "--arg", "x=f32[8,8]", "--arg", "y=f32[8]"]
ATTENTION = [
    "explain", "attention", "--arg", "query=bf16[2,1024,8,128]", "--arg", "key=bf16[2,1024,2,128]",
    "--arg", "value=bf16[2,1024,2,128]", "--param", "is_causal=true",
]  # fmt: skip


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr; both must fit 80 columns unless they are JSON."""
    code = main(argv)
    out, err = capsys.readouterr()
    assert "--json" in argv or not out or fits(out), out
    assert not err or fits(err), err
    assert "\033" not in out + err
    return code, out, err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "version")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        "opmux", "python", "jax", "jaxlib", "numpy", "pydantic", "pluggy",
    ]  # fmt: skip
    found = json.loads(run(capsys, "version", "--json")[1])
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["opmux"] in out


@pytest.mark.parametrize("command", ["", "demo", "list", "explain", "env", "doctor", "version"])
def test_help_fits_and_shows_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *filter(None, [command]), "--help")
    assert code == 0
    if command not in ("version", "demo"):
        assert "examples:\n  " in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "required: COMMAND"),
        (["lisst"], "invalid choice: 'lisst'"),
        (["explain"], "required: OP"),
        (["explain", "add", "--arg", "x=bf17[2]"], "argument --arg: unknown dtype 'bf17'; did you mean bf16"),
        (["explain", "add", "--config", "{"], "argument --config: no JSON at column 2"),
        (["explain", "addd"], "unknown op 'addd' in get('addd'); did you mean 'add'?"),
        ([*ADD, "--backend", "xlaa"], "did you mean 'xla'?"),
        ([*ADD, "--backend", "a;;b=c=d"], "a second '='"),
        ([*ADD, "--device", "h300"], "unknown device 'h300'; did you mean 'h200'"),
        (["list", "--device", "cuda"], "'cuda' is a platform"),
        (["explain", "add", "--arg", "x=f32[8]"], "argument 'y': got nothing; allowed: an array. Example: --arg y=f32"),
        ([*ADD, "--arg", "x=f32[8]"], "argument 'x': got two values"),
        ([*ADD, "--param", "z=1"], "argument 'z': got an unknown keyword; allowed: add(x, y)"),
        (["explain", "add", "--arg", "x=f32[8]", "--param", "y=f32"], "argument 'y': got the text 'f32'"),
        (["explain", "add", "--arg", "x=f32[8]", "--arg", "y=f32[9]"], "argument 'y': got shape (9,)"),
        ([*ATTENTION, "--param", "scale=abc"], "argument 'scale'"),
    ],
)
def test_wrong_usage_is_code_2_with_a_message_and_no_traceback(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert says in " ".join(err.split())
    assert "Traceback" not in err


def test_explain_chooses_for_the_device_that_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *ADD)
    assert code == 0
    assert out.startswith("add  x f32[8,8]  y f32[1,8]")
    assert "device    cpu (cpu)" in out
    assert "selected" in out


@pytest.mark.parametrize("device", devices.names())
def test_explain_chooses_for_devices_that_are_absent(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *ATTENTION, "--device", device, "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["device"], found["platform"]) == (device, devices.device(device).platform)
    assert found["backend"] in {candidate["backend"] for candidate in found["candidates"]}


def test_explain_passes_parameters_on(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, *ATTENTION, "--param", "local_window_size=(128,None)", "--param", "scale=0.5")[1]
    assert "scale=0.5" in out
    assert "left=128" in out
    argv = ["explain", "reduce", "--arg", "x=bf16[8,4,2]", "--param", "axis=[0,-1]", "--param", "dtype=f32"]
    out = run(capsys, *argv, "--param", "kind=mean")[1]
    assert "mean" in out
    assert "float32" in out


def test_explain_keeps_64_bit_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    out = run(capsys, "explain", "add", "--arg", "x=f64[8]", "--arg", "y=2.5")[1]
    assert out.startswith("add  x f64[8]")
    out = run(capsys, "explain", "add", "--arg", "x=f32[8]", "--arg", "y=2.5")[1]
    assert "f64" not in out


def test_explain_forced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = json.loads(run(capsys, *ADD, "--backend", "xla", "--json")[1])
    assert (found["backend"], found["forced_by"], found["forced"]) == ("xla", "call", ["xla"])
    monkeypatch.setenv("OPMUX_BACKEND", "xla")
    code, out, _ = run(capsys, *ADD)
    assert code == 0
    assert 'environment: backend="*=xla"' in out


def test_explain_is_1_where_nothing_can_run_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *ADD, "--config", '{"no_such_field": 3}')
    assert code == 1
    assert "chosen    none" in out
    assert "no_such_field" in out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "list")
    assert code == 0
    assert "Priorities on cpu (cpu)" in out
    found = json.loads(run(capsys, "list", "--json")[1])
    assert {"add", "attention", "chunk_fwd_h", "matmul", "reduce"} <= set(found["ops"])
    assert {"interpret", "xla"} <= set(found["backends"])
    assert found["failed"] == found["disabled"] == []
    for op, cells in found["ops"].items():
        assert [cell["state"] for cell in cells.values()].count("first") == 1, op
    assert found["ops"]["attention"]["interpret"]["backward"] is True
    assert found["ops"]["attention"]["xla"]["backward"] is False


def test_list_marks_the_first_as_explain_would_choose(capsys: pytest.CaptureFixture[str]) -> None:
    cells = json.loads(run(capsys, "list", "--json")[1])["ops"]["add"]
    chosen = json.loads(run(capsys, *ADD, "--json")[1])["backend"]
    assert cells[chosen]["state"] == "first"


def test_list_marks_what_is_forced_and_names_what_is_disabled(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPMUX_BACKEND", "add=xla")
    monkeypatch.setenv("OPMUX_DISABLE", "interpret,mosaic_gpu,mosaic_tpu")
    out = run(capsys, "list")[1]
    assert "!    forced" in out
    assert "disabled  interpret" in out
    found = json.loads(run(capsys, "list", "--json")[1])
    assert found["ops"]["add"]["xla"]["state"] == "forced"
    assert found["ops"]["matmul"]["xla"]["state"] == "first"
    assert list(found["backends"]) == ["xla"]


def test_env_says_what_was_read_and_from_where(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "env")[1].count("source    default") == 4
    text = "attention@cuda=interpret,xla; *=xla"
    monkeypatch.setenv("OPMUX_BACKEND", text)
    monkeypatch.setenv("OPMUX_DISABLE", " ")
    monkeypatch.setenv("OPMUX_STRICT_PLUGINS", "1")
    code, out, _ = run(capsys, "env")
    assert code == 0
    assert text in out
    assert "* on every platform: xla; attention on cuda: interpret then xla" in out
    found = json.loads(run(capsys, "env", "--json")[1])
    assert found["variables"]["OPMUX_BACKEND"] == {
        "text": text,
        "source": "environment",
        "value": [
            {"op": "*", "platform": "", "backends": ["xla"]},
            {"op": "attention", "platform": "cuda", "backends": ["interpret", "xla"]},
        ],
        "error": None,
    }
    assert found["variables"]["OPMUX_DISABLE"]["source"] == "default"
    assert found["policy"]["strict"] is True
    assert found["policy"]["layers"][0]["source"] == "environment"


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("OPMUX_BACKEND", "attention@cud=xla", "column 11: unknown platform 'cud'"),
        ("OPMUX_BACKEND", "nope", "unknown backend 'nope'"),
        ("OPMUX_SIMULATE", "sometimes", "allowed: auto, never, always"),
        ("OPMUX_STRICT_PLUGINS", "perhaps", "allowed: 1, true, 0, false"),
        ("OPMUX_DISABLE", "a b", "column 2"),
    ],
)
def test_env_shows_every_variable_even_if_one_is_wrong(
    name: str, text: str, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, text)
    code, out, _ = run(capsys, "env")
    assert code == 2
    assert says in " ".join(out.split())
    assert sum(line.startswith("OPMUX_") for line in out.splitlines()) == 4
    assert says in json.loads(run(capsys, "env", "--json")[1])["variables"][name]["error"]
    code, out, err = run(capsys, "list")
    assert (code, out) == (2, "")
    assert says in " ".join(err.split())


def test_the_column_pointer_of_a_syntax_error_stays_under_its_column(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPMUX_BACKEND", "attention@cud=xla")
    lines = run(capsys, "list")[2].splitlines()
    at = next(i for i, line in enumerate(lines) if line.strip() == "^")
    assert lines[at - 1][lines[at].index("^")] == "c"


def python(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/", capture_output=True)


def test_version_and_help_import_no_jax() -> None:
    python(
        "import sys\n"
        "from opmux.cli.main import main\n"
        "assert 'jax' not in sys.modules\n"
        "assert main(['version']) == 0 and main(['--help']) == 0\n"
        "assert 'jax' not in sys.modules\n"
    )


def test_looking_at_absent_devices_initialises_no_jax_backend() -> None:
    python(
        "from opmux.cli.main import main\n"
        f"assert main({[*ATTENTION, '--device', 'h200']!r}) == 0\n"
        "assert main(['list', '--device', 'v6e']) == 0 and main(['env']) == 0\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )


def test_a_backend_that_jax_cannot_start_is_a_message() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "opmux.cli", "list"],
        env={**os.environ, "JAX_PLATFORMS": "no_such_platform"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "no_such_platform" in done.stderr
    assert "Traceback" not in done.stderr


def test_both_ways_to_start_it() -> None:
    ways = [[sys.executable, "-m", "opmux.cli"]]
    script = shutil.which("opmux", path=str(Path(sys.executable).parent))
    ways += [[script]] if script else []
    found = {
        subprocess.run([*way, "version"], check=True, cwd="/", capture_output=True, text=True).stdout for way in ways
    }
    assert len(found) == 1
    assert "jaxlib" in found.pop()


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = f"{sys.executable} -m opmux.cli version | true; test ${{PIPESTATUS[0]}} -eq 0"
    done = subprocess.run(["bash", "-c", command], cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""`opmux certify` and `opmux compile`: arguments, errors, progress, reports and exit codes."""

import io
import json

import pytest

from opmux import registry
from opmux.certify import compiling, run
from opmux.certify.baseline import Baseline
from opmux.certify.results import CompileResult, KernelMeasures, SimulateResult
from opmux.cli.certify import Bar
from opmux.cli.main import main
from opmux.core.implementation import BackendInfo, Implementation


@pytest.fixture(autouse=True)
def acme(isolated_registry, plain_terminal):
    """A backend for TPUs and its simulator."""

    class Plugin:
        @staticmethod
        @registry.hookimpl
        def opmux_backend():
            return BackendInfo("acme", platforms=("tpu",), simulator="acme:simulate")

        @staticmethod
        @registry.hookimpl
        def opmux_implementations():
            return [Implementation("add", kernel="acme:add", priority={"tpu": 99})]

    registry.register(Plugin, "acme")


@pytest.fixture
def work(monkeypatch):
    """Does what would be done in children: everything is fine but what a test says is not."""
    from opmux.certify import simulate

    done = {"status": "ok", "bundles": 100.0, "race": False, "jobs": []}

    def simulated(jobs, *, parallel=None, limit=0.0):
        for job in jobs:
            done["jobs"].append(job)
            bad = {"status": "failed", "kind": "race", "words": "RACE DETECTED"} if done["race"] else {"status": "ok"}
            yield SimulateResult(backend=job.backend, op=job.op, case=job.case, mode=job.mode, **bad)

    def compiled(jobs, *, parallel=None, cached=True):
        for job in jobs:
            done["jobs"].append(job)
            yield CompileResult(
                backend=job.backend, op=job.op, workload=job.workload.name, target=job.target, status=done["status"],
                words="" if done["status"] == "ok" else "it spills", config=dict(job.config),
                kernels=(KernelMeasures(kernel="k", figures={"bundles": done["bundles"]}),),
            )  # fmt: skip

    monkeypatch.setattr(simulate, "simulate", simulated)
    monkeypatch.setattr(compiling, "compile_jobs", compiled)
    monkeypatch.setattr(compiling, "missing", lambda target: "")
    monkeypatch.setattr(run, "_versions", lambda: {"jax": "1", "libtpu": "2"})
    return done


ONLY = ["--backend", "acme", "--op", "add", "--target", "tpu-v6e"]


def test_all_is_well(work, capsys):
    assert main(["certify", *ONLY]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0].split() == ["value", "races", "v6e"]
    assert out.splitlines()[2].split() == ["add", "ok", "ok", "ok"]
    assert "none failed" in out
    assert len(err.splitlines()) == 1  # the last one: no terminal, so no bar


@pytest.mark.parametrize(("what", "value"), [("race", True), ("status", "failed")])
def test_a_failure_is_exit_code_1_and_is_told(work, capsys, what, value):
    work[what] = value
    assert main(["certify", *ONLY]) == 1
    out, err = capsys.readouterr()
    assert "FAIL" in out
    assert ("RACE DETECTED" if what == "race" else "it spills") in out
    assert "failed" in err


def test_the_baseline_is_made_kept_and_compared_with(work, capsys, tmp_path):
    path = tmp_path / "figures.json"
    with_baseline = ["certify", *ONLY, "--only", "compile", "--baseline", str(path)]
    assert main(with_baseline) == 2
    assert "there is no such file; --update-baseline makes one" in " ".join(capsys.readouterr().err.split())
    assert main([*with_baseline, "--update-baseline"]) == 0
    assert "jax 1, libtpu 2" in Baseline.read(path).sections
    capsys.readouterr()
    assert main(with_baseline) == 0
    work["bundles"] = 110.0
    assert main(with_baseline) == 1
    assert "bundles 100 -> 110 (2% more is allowed)" in capsys.readouterr().out
    work["status"] = "failed"
    assert main([*with_baseline, "--update-baseline"]) == 1  # a failure is one whatever is kept


def test_reports_are_written(work, capsys, tmp_path):
    assert main(["certify", *ONLY, "--json", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 0
    found = run.Report.model_validate_json((tmp_path / "r.json").read_text())
    assert found.ok
    assert {result.target for result in found.compiled} == {"tpu-v6e"}
    assert "<title>opmux certify: fine</title>" in (tmp_path / "r.html").read_text()
    capsys.readouterr()
    assert main(["certify", *ONLY, "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["level"] == "quick"


def test_folders_are_checked_before_the_work(work, capsys, tmp_path):
    assert main(["certify", *ONLY, "--html", str(tmp_path / "none" / "r.html")]) == 2
    assert "there is no folder" in " ".join(capsys.readouterr().err.split())
    assert work["jobs"] == []


@pytest.mark.parametrize("only", ["simulate", "compile"])
def test_only_one_part(work, only):
    assert main(["certify", *ONLY, "--only", only]) == 0
    assert {type(job).__name__ for job in work["jobs"]} == {{"simulate": "SimulateJob", "compile": "CompileJob"}[only]}


def test_full_is_more_than_quick(work):
    main(["certify", *ONLY])
    quick = len(work["jobs"])
    main(["certify", *ONLY, "--level", "full"])
    assert len(work["jobs"]) - quick > 2 * quick


def test_a_target_of_another_kind_of_device_is_left_out(work):
    assert main(["certify", "--backend", "acme", "--target", "tpu-v6e,h200", "--only", "compile"]) == 0
    assert {job.target for job in work["jobs"]} == {"tpu-v6e"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "acm"], "did you mean 'acme'?"),
        (["--op", "ad"], "did you mean 'add'?"),
        (["--target", "tpu-v3"], "unknown device 'tpu-v3' in target"),
        (["--target", "a100"], "Kernels can be compiled for these devices only."),
        (["--backend", "acme", "--target", "h200", "--only", "compile"], "nothing to do for acme"),
        (["--backend", "acme,,"], "allowed: names separated by commas"),
    ],
)
def test_names_that_mean_nothing(work, capsys, words, said):
    assert main(["certify", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert work["jobs"] == []


def test_without_a_compiler_simulation_still_runs(work, monkeypatch, capsys):
    monkeypatch.setattr(
        compiling, "missing", lambda target: f"compiling for {target} needs libtpu: {compiling.INSTALL}"
    )
    assert main(["certify", *ONLY]) == 0
    assert "not done: compiling for tpu-v6e needs libtpu: pip install 'opmux[certify]'" in capsys.readouterr().out
    assert {type(job).__name__ for job in work["jobs"]} == {"SimulateJob"}


@pytest.mark.parametrize(
    "words",
    [
        ["certify", *ONLY, "--only", "compile"],
        ["compile", "add", "--arg", "x=f32[8]", "--arg", "y=f32[8]", "--target", "tpu-v6e"],
    ],
)
def test_without_a_compiler_and_nothing_else_to_do(monkeypatch, capsys, words):
    monkeypatch.setattr(compiling, "_installed", lambda module: False)
    assert main(words) == 2
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert out == ""
    assert said.startswith("opmux: compiling for tpu-v6e needs libtpu")
    assert said.endswith(": pip install 'opmux[certify]'")


CALL = ["compile", "add", "--arg", "x=f32[64,256]", "--arg", "y=2.5"]


def test_one_call_for_several_devices(work, capsys):
    assert main([*CALL, "--target", "tpu-v6e,v5e", "--config", "{}"]) == 0
    assert [job.target for job in work["jobs"]] == ["tpu-v6e", "tpu-v5e"]
    job = work["jobs"][0]
    assert (job.backend, job.workload.args, job.workload.params) == ("acme", {"x": "f32[64,256]"}, {"y": 2.5})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1] not in ("", " ")] == [
        "tpu-v6e", "tpu-v5e",
    ]  # fmt: skip
    assert main([*CALL, "--target", "tpu-v6e", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["backend"] == "acme"


def test_a_call_that_does_not_compile_is_exit_code_1(work, capsys):
    work["status"] = "failed"
    assert main([*CALL, "--target", "tpu-v6e"]) == 1
    assert "it spills" in capsys.readouterr().out


def test_a_backend_that_refuses_the_device(work, capsys):
    assert main([*CALL, "--target", "h200", "--backend", "acme"]) == 1
    assert "acme: runs on tpu, not on cuda" in " ".join(capsys.readouterr().out.split())
    assert work["jobs"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compile", "add", "--arg", "x=f32[8]", "--target", "tpu-v6e"], "add: argument 'y'"),
        ([*CALL, "--arg", "x=f32[8]", "--target", "tpu-v6e"], "two values"),
        ([*CALL, "--target", "tpu-v3"], "unknown device 'tpu-v3' in target"),
        ([*CALL], "the following arguments are required: --target"),
        (["compile", "sub", "--target", "h200"], "unknown op 'sub'"),
        ([*CALL, "--target", "h200", "--config", "3"], "allowed: an object"),
    ],
)
def test_calls_that_mean_nothing(work, capsys, words, said):
    assert main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_bar_is_for_terminals():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        bar = Bar(stream)
        bar(1, 4, "ok       one")
        bar(2, 4, "failed   two")
        bar(4, 4, "ok       four")
        bar.close()
    assert "\r[#####...............] 1/4 ok       one" in terminal.getvalue()
    assert "\n" not in terminal.getvalue()
    assert max(map(len, terminal.getvalue().split("\r"))) <= 80
    assert pipe.getvalue() == "2/4 failed   two\n4/4 ok       four\n"

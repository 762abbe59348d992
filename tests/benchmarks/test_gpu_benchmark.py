"""`benchmarks/gpu.py` without a GPU: what it runs, what it makes of kernels, and the whole of it, simulated."""

import json
import os
import subprocess
import sys
import time
import types
import zipfile
from pathlib import Path

import jax.numpy as jnp
import pytest

from opmux import registry
from opmux.core.implementation import BackendInfo, Implementation
from opmux.registry import hookimpl

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(tmp_path, *arguments, limit=1500):
    """Runs the script, simulated, and returns what it printed and what it wrote."""
    path = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py"), "--simulate", "--json", str(path), *arguments],
        env={**os.environ, "XLA_FLAGS": ""}, cwd=tmp_path, capture_output=True, text=True, timeout=limit,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(path.read_text())


def test_rows_of_each_kind_are_simulated(tmp_path):
    only = "numerics add float32 40x136,speed add forward float32 64x128"
    printed, found = run(tmp_path, "--only", only)
    rows = {(row["task"], row["part"]): row for row in found["rows"]}
    assert found["finished"]
    assert found["facts"]["simulated"]
    assert {"jax", "jaxlib"} <= set(found["facts"]["versions"])
    for way in ("forward", "backward"):
        row = rows["numerics add float32 40x136", way]
        assert row["status"] == "ok"
        assert row["error"] <= row["tolerance"]
    for name in ("mosaic_gpu", "jnp.add", "xla"):
        row = rows["speed add forward float32 64x128", name]
        assert row["status"] == "simulated"
        assert row["unit"] == "B/s"
        assert not row["of_peak"]
    assert "which means nothing" in printed
    assert all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.slow
def test_all_that_matters_most_is_simulated(tmp_path):
    printed, found = run(tmp_path, "--tier", "0", "--minutes", "60", "--config", 'matmul={"band": 2}', limit=3600)
    assert found["finished"]
    bad = [row for row in found["rows"] if row["status"] not in ("ok", "simulated", "skipped", "refused")]
    assert not bad, json.dumps(bad, indent=1)
    skipped = {row["part"] for row in found["rows"] if row["status"] == "skipped"}
    assert skipped <= {"jax.nn cudnn", "JAX attention_mgpu", "JAX hopper_matmul_mgpu"}
    assert {row["op"] for row in found["rows"]} == set(registry.ops())
    assert "mosaic_gpu band=2" in {row["part"] for row in found["rows"] if row["op"] == "matmul"}
    assert all(len(line) <= 80 for line in printed.splitlines())


@pytest.mark.parametrize("small", [False, True], ids=["gpu", "simulated"])
def test_every_op_is_checked_and_timed_in_both_directions(part, small):
    tasks = part("gpu_worker").tasks(small, "")
    names = [task.name for task in tasks]
    assert len(set(names)) == len(names)
    for op in registry.ops():
        ways = {
            way
            for task in tasks
            if task.kind == "numerics" and task.problem.op == op
            for way in task.problem.directions
        }
        assert ways == {"forward", "backward"}, op
        assert any(task.kind == "speed" and task.problem.op == op and task.problem.tier == 0 for task in tasks)
    tiers = [task.problem.tier for task in tasks]
    assert tiers == sorted(tiers)


def test_words_choose_rows(part):
    names = [
        task.name for task in part("gpu_worker").tasks(False, "speed attention T8192 causal backward,numerics add")
    ]
    assert any(name.startswith("numerics add") for name in names)
    timed = [name for name in names if name.startswith("speed")]
    assert timed
    assert all({"attention", "backward", "T8192", "causal"} <= set(name.split()) for name in timed)


def broken(kernel, vjp=None, supports=None):
    """A backend whose `add` is the given kernel."""
    found = [Implementation("add", kernel=kernel, **({"supports": supports} if supports else {}))]
    found += [Implementation("add_vjp", kernel=vjp)] if vjp else []
    return types.SimpleNamespace(
        __name__="broken",
        opmux_backend=hookimpl(lambda: BackendInfo("broken")),
        opmux_implementations=hookimpl(lambda: found),
    )


def off_by(amount):
    return lambda request, operands, config: {
        "out": operands["x"] + operands["y"] + jnp.asarray(amount, operands["x"].dtype)
    }


@pytest.fixture
def checked(part, isolated_registry, monkeypatch):
    """Checks and times a backend's `add` as the worker does, and returns the rows."""
    worker, numerics, speed, problems = map(part, ("gpu_worker", "gpu_numerics", "gpu_speed", "gpu_problems"))
    monkeypatch.setattr(numerics, "BACKEND", "broken")
    monkeypatch.setattr(speed, "BACKEND", "broken")

    def rows(plugin, kinds=("numerics", "speed"), **order):
        if plugin is not None:
            registry.register(plugin)
        said = []
        order = {
            "simulate": False,
            "only": "",
            "tier": 2,
            "without": [],
            "done": [],
            "configs": {},
            "rounds": 2,
            **order,
        }
        order.setdefault("deadline", time.time() + 60)
        made = worker.Worker(order, lambda what, **values: said.append(values["row"]) if what == "row" else None)
        problem = problems.add((8, 24), (8, 24), jnp.float32)
        for kind in kinds:
            made.attempt(worker.Task(kind, problem, None if kind == "numerics" else "forward"))
        return {row["part"]: row for row in said}

    return rows


def test_a_right_kernel_is_ok_and_is_timed(checked):
    rows = checked(broken(off_by(0)))
    assert rows["forward"]["status"] == rows["backward"]["status"] == rows["broken"]["status"] == "ok"
    assert rows["backward"]["detail"] == "derivative of the reference"
    assert rows["broken"]["to_ours"] == 1
    assert rows["jnp.add"]["to_ours"] > 0


def test_a_wrong_kernel_is_wrong(checked):
    rows = checked(broken(off_by(1e-3)))
    assert rows["forward"]["status"] == rows["broken"]["status"] == "wrong"
    assert rows["forward"]["error"] > rows["forward"]["tolerance"]
    assert rows["jnp.add"]["status"] == "ok"


def test_a_wrong_backward_is_wrong(checked):
    rows = checked(
        broken(off_by(0), vjp=lambda request, operands, config: dict.fromkeys(request.wanted, 2 * operands["d_out"])),
        ["numerics"],
    )
    assert (rows["forward"]["status"], rows["backward"]["status"]) == ("ok", "wrong")


def test_a_kernel_that_raises_is_a_row(checked):
    def kernel(request, operands, config):
        raise ValueError("no such tile\nand more")

    rows = checked(broken(kernel))
    for name in ("forward", "backward", "broken"):
        assert (rows[name]["status"], rows[name]["detail"]) == ("failed", "ValueError: no such tile")
    assert rows["xla"]["status"] == "ok"


def test_a_refusal_is_a_row_with_the_reason(checked):
    reason = registry.Rejection("dtype", "float32 is not for it")
    rows = checked(broken(off_by(0), supports=lambda request, device: [reason]))
    for name in ("forward", "backward", "broken"):
        assert (rows[name]["status"], rows[name]["detail"]) == ("refused", "dtype: float32 is not for it")


def test_a_kernel_that_is_not_there_is_refused(checked):
    assert checked(None, ["numerics"])["forward"]["detail"] == "no kernel is registered"


def test_contenders_of_a_child_that_died_are_left_out(checked):
    rows = checked(
        broken(off_by(0)), without=[("numerics add float32 8x24", "forward"), ("speed add forward float32 8x24", "xla")]
    )
    assert set(rows) == {"backward", "broken", "jnp.add"}


def test_deviations_are_relative_to_rows_and_see_what_is_not_finite(part):
    deviation = part("gpu_numerics").deviation
    want = jnp.asarray([[4.0, 1.0], [100.0, 0.0]])
    assert float(deviation(want.at[1, 1].set(1.0), want)) == pytest.approx(0.01)
    assert float(deviation(want.at[0, 0].set(jnp.nan), want)) == jnp.inf
    lost = want.at[0, 0].set(-jnp.inf)
    assert float(deviation(lost, lost)) == 0
    assert float(deviation(jnp.arange(3), jnp.arange(3).at[1].set(0))) == 1


def test_sources_and_wheels_become_importable(tmp_path):
    wheels, site, packages = tmp_path / "wheels", tmp_path / "site", tmp_path / "packages"
    for folder in (wheels, site, packages):
        folder.mkdir()
    # All that is installed but opmux; -S leaves out what an editable install would find.
    for installed in (path for path in map(Path, sys.path) if path.name == "site-packages"):
        for entry in installed.iterdir():
            if not entry.name.startswith(("opmux", "__")) and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    with zipfile.ZipFile(wheels / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "VALUE = 7\n")
    code = (
        "import sys; from pathlib import Path; from gpu_site import prepare\n"
        f"print(prepare(Path({str(site)!r}), Path({str(wheels)!r}))['PYTHONPATH'].split(':')[0])\n"
        "import brought, opmux.core; print(brought.VALUE, opmux.core.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(packages)])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site), "7", str(site / "opmux" / "core" / "__init__.py")]


def test_what_is_missing_is_named(tmp_path):
    code = "from pathlib import Path; import gpu_site; gpu_site.NEEDED += ('absent_module',)\n"
    code += f"gpu_site.prepare(Path({str(tmp_path)!r}), None)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(FOLDER)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "missing: absent_module" in done.stderr
    assert "--wheels" in done.stderr


def test_lines_fit_80_columns(part):
    table = part("gpu_table")
    timed = {
        "task": "speed attention forward bfloat16 B2 T8192 N16 H128 causal", "kind": "speed", "op": "attention",
        "part": "JAX hopper_matmul_mgpu", "status": "ok", "median_s": 0.0123456, "rate": 987.6e12, "unit": "FLOP/s",
        "of_peak": 0.998, "to_ours": 1.23,
    }  # fmt: skip
    wrong = {"task": "numerics add x", "kind": "numerics", "op": "add", "part": "forward", "status": "wrong"}
    wrong |= {"error": "inf", "tolerance": 1e-3, "seconds": 3.0, "detail": "['query'] " * 20}
    text = table.summary([timed, wrong, {**timed, "median_s": 12e-6, "rate": 4321e9, "unit": "B/s", "part": "xla"}])
    assert all(len(line) <= 80 for line in text.splitlines())
    for said in ("987.6 TFLOP/s", "12.346 ms", "12.00 us", "4321.0 GB/s", "100 %", "1.23x", "inf of 1.0e-03"):
        assert said in text

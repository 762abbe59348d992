"""Figures kept and compared."""

import json
import math

import pytest

from opmux.certify import baseline
from opmux.certify.baseline import Baseline
from opmux.certify.results import CompileResult, Estimate, KernelMeasures
from opmux.core.errors import SettingError

VERSIONS = {"jax": "0.12.0.1", "libtpu": "0.0.50.1", "nvidia-cuda-nvcc": "13.5.37"}


def result(target="tpu-v6e", status="ok", seconds=1e-4, hbm=1024.0, **figures):
    figures = {"bundles": 300.0, "spills": 0.0, **figures}
    return CompileResult(
        backend="acme", op="add", workload="f32", target=target, status=status, hbm_bytes=hbm,
        kernels=(KernelMeasures(kernel="k", figures=figures),),
        estimate=Estimate(seconds=seconds, bound="memory", memory_seconds=seconds, compute_seconds=0.0),
    )  # fmt: skip


@pytest.fixture
def kept():
    found = Baseline({})
    found.update([result(), result("h200", wgmma=8.0, registers=168.0)], VERSIONS)
    return found


def regressed(kept, found, versions=VERSIONS):
    return {(each.kernel, each.figure) for each in kept.regressions([found], versions)}


def test_nothing_is_worse_than_itself(kept):
    assert kept.regressions([result(), result("h200", wgmma=8.0, registers=168.0)], VERSIONS) == []


@pytest.mark.parametrize(
    ("change", "worse"),
    [
        ({"bundles": 306.0}, set()),  # 2 %
        ({"bundles": 307.0}, {("k", "bundles")}),
        ({"bundles": 100.0}, set()),
        ({"spills": 1.0}, {("k", "spills")}),
        ({"salu": 1e6}, set()),  # was not known before
        ({"seconds": 1.03e-4}, {("program", "estimate")}),
        ({"hbm": 1025.0}, {("program", "hbm_bytes")}),
    ],
)
def test_what_is_worse_on_a_tpu(kept, change, worse):
    assert regressed(kept, result(**change)) == worse


@pytest.mark.parametrize(
    ("change", "worse"),
    [({"wgmma": 16.0}, set()), ({"wgmma": 0.0}, {("k", "wgmma")}), ({"registers": 169.0}, {("k", "registers")})],
)
def test_what_is_worse_on_a_gpu(kept, change, worse):
    assert regressed(kept, result("h200", **{"wgmma": 8.0, "registers": 168.0, **change})) == worse


@pytest.mark.parametrize("status", ["failed", "refused", "aborted", "timeout"])
def test_what_compiled_once_must_compile(kept, status):
    (found,) = kept.regressions([result(status=status)], VERSIONS)
    assert (found.figure, found.baseline, found.found) == ("compiles", 1, 0)
    assert found.key == "acme/add/f32/tpu-v6e"


def test_a_kernel_that_is_gone_is_told(kept):
    renamed = result().model_copy(update={"kernels": (KernelMeasures(kernel="other", figures={"bundles": 1.0}),)})
    assert regressed(kept, renamed) == {("k", "present")}


def test_figures_of_other_versions_are_not_compared(kept):
    other = {**VERSIONS, "libtpu": "0.0.51"}
    assert regressed(kept, result(bundles=900.0), other) == set()
    assert kept.unknown([result()], other) == ["jax 0.12.0.1, libtpu 0.0.51"]
    assert kept.unknown([result()], VERSIONS) == []
    # ptxas has nothing to do with it.
    assert regressed(kept, result(bundles=900.0), {**VERSIONS, "nvidia-cuda-nvcc": "14"}) == {("k", "bundles")}


def test_an_update_replaces_what_was_run_and_nothing_else(kept):
    kept.update([result(bundles=400.0)], VERSIONS)
    assert regressed(kept, result(bundles=400.0)) == set()
    assert set(kept.sections) == {"jax 0.12.0.1, libtpu 0.0.50.1", "jax 0.12.0.1, ptxas 13.5.37"}
    kept.update([result(status="failed")], VERSIONS)
    assert kept.of(result(), VERSIONS) is None
    assert kept.of(result("h200"), VERSIONS) is not None


def test_files_round_trip_and_differ_by_line(kept, tmp_path):
    path = tmp_path / "baseline.json"
    kept.write(path)
    assert Baseline.read(path).sections == kept.sections
    before = path.read_text().splitlines()
    kept.update([result(bundles=301.0)], VERSIONS)
    kept.write(path)
    assert sum(one != other for one, other in zip(before, path.read_text().splitlines(), strict=True)) == 1


def test_files_that_are_no_baseline(tmp_path):
    assert Baseline.read(tmp_path / "none.json").sections == {}
    for number, text in enumerate(["{", "[]", '{"jax": {"key": {"kernel": {"figure": "many"}}}}', '{"jax": 3}']):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(SettingError, match=f"baseline .*{number}.json"):
            Baseline.read(path)


def test_every_figure_has_a_tolerance():
    for name in ("bundles@2", "spill_store_bytes", "LDL", "smem_dynamic_bytes", "HGMMA", "salu@1", "estimated_cycles"):
        assert 0 <= baseline.tolerance(name) <= 0.05


def test_the_committed_baseline_can_be_read_and_is_as_written(tmp_path):
    found = Baseline.read(baseline.COMMITTED)
    found.write(tmp_path / "again.json")
    if baseline.COMMITTED.exists():
        assert (tmp_path / "again.json").read_text() == baseline.COMMITTED.read_text()
    for section in found.sections.values():
        for key, kernels in section.items():
            assert key.count("/") == 3
            assert all(math.isfinite(value) for figures in kernels.values() for value in figures.values())
    json.dumps(found.sections, allow_nan=False)

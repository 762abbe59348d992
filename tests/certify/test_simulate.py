"""What is simulated, and how a failure is told."""

import pytest
from pydantic import Field

from opmux import registry
from opmux.certify import block_cases, simulate, simulated
from opmux.core.config import Config
from opmux.core.errors import SimulationError
from opmux.core.implementation import BackendInfo, Implementation
from opmux.core.ops import builtin_ops
from opmux.core.simulation import SimulatorOptions


class Schema(Config):
    block_rows: int = Field(default=512, gt=0, multiple_of=8)
    block_lanes: int = Field(default=1024, gt=0, multiple_of=128)
    num_stages: int = Field(default=4, gt=0, le=8)
    least_bytes: int = Field(default=1 << 20, ge=0)
    vmem_limit_bytes: int = Field(default=1 << 24, gt=0)
    short: int = Field(default=8, gt=0, le=8, multiple_of=4)
    transpose: bool = True


def test_small_blocks_are_small_and_allowed():
    found = block_cases.small_blocks(Schema)
    assert found == {"block_rows": 16, "block_lanes": 128, "num_stages": 2, "least_bytes": 0, "short": 8}
    Schema(**found)


def test_block_cases_have_names_of_their_own():
    for name, op in builtin_ops().items():
        names = [case.name for case in (*block_cases.block_cases(name), *op.cases())]
        assert len(names) == len(set(names))
        assert all(simulated.find_case(op, each).name == each for each in names)


@pytest.fixture
def plugins(isolated_registry, monkeypatch):
    from opmux.registry import tables
    from opmux.registry.loader import Loader

    monkeypatch.setattr(tables, "loader", Loader(tuple))

    def register(name, platform, *ops, simulator="somewhere:simulate"):
        class Plugin:
            @staticmethod
            @registry.hookimpl
            def opmux_backend():
                return BackendInfo(name, platforms=(platform,), simulator=simulator)

            @staticmethod
            @registry.hookimpl
            def opmux_implementations():
                return [Implementation(op, kernel="somewhere:kernel") for op in ops]

        registry.register(Plugin, name)

    return register


def test_quick_takes_a_few_cases_in_every_mode_and_full_takes_all(plugins):
    plugins("acme", "tpu", "add", "attention_vjp")
    plugins("other", "tpu", "add", simulator="")
    quick, skipped = simulate.plan(["acme", "other"], ["add", "attention"], "quick")
    full, _ = simulate.plan(["acme", "other"], ["add", "attention"], "full")
    assert not skipped
    assert {job.backend for job in full} == {"acme"}
    assert {job.mode for job in quick if job.op == "add" and not job.small_blocks} == {
        "dma=on_wait seed=0 cores=2", "dma=eager seed=0 cores=2",
    }  # fmt: skip
    op = builtin_ops()["add"]
    cases = {job.case for job in full if job.op == "add"}
    assert cases == {case.name for case in (*block_cases.block_cases("add"), *op.cases())}
    assert {job.case for job in quick if job.op == "add"} < cases
    assert len({job.mode for job in full if job.case == "blocks"}) == 6
    gradients = [job for job in full if job.op == "attention_vjp"]
    attention = (*block_cases.block_cases("attention"), *builtin_ops()["attention"].cases())
    assert {job.case for job in gradients} == {case.name for case in attention if case.grad}
    assert len({job.key for job in full}) == len(full)


def test_long_cases_are_said_to_be_left_out(plugins):
    plugins("acme", "tpu", "chunk_fwd_h", "chunk_fwd_h_vjp")
    full, skipped = simulate.plan(["acme"], ["chunk_fwd_h"], "full")
    assert skipped == ["simulating acme chunk_fwd_h packed_many: thousands of steps"]
    assert "packed_many" not in {job.case for job in full}
    assert simulate.plan(["acme"], ["chunk_fwd_h"], "quick")[1] == []


def test_late_and_early_copies_are_one_batch(plugins):
    plugins("acme", "tpu", "add")
    full, _ = simulate.plan(["acme"], ["add"], "full")
    pairs = list(zip(full[::2], full[1::2], strict=True))
    assert all(late.batch == early.batch and late.key != early.key for late, early in pairs)
    assert len({late.batch for late, _ in pairs}) == len(pairs)


def test_an_op_without_an_oracle_is_said_to_be_left_out(plugins, monkeypatch):
    plugins("acme", "cuda", "add")
    monkeypatch.setattr(simulate, "find_oracle", lambda name: (_ for _ in ()).throw(LookupError(name)))
    jobs, skipped = simulate.plan(["acme"], ["add"], "quick")
    assert jobs == []
    assert skipped == ["simulating acme add: opmux has no oracle of the op 'add'"]


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("RACE DETECTED\n write of ('vmem', 1)", "race"),
        ('Out-of-bounds block index (0, 3) for input "x_ref"', "out-of-bounds"),
        ("Out of bounds read of HostAllocationKey", "out-of-bounds"),
        ("Barrier completed phase 1, but no threads observed phase 0.", "barrier"),
        ("Semaphore has non-zero value at the end", "barrier"),
        ("unsupported primitive", "error"),
    ],
)
def test_kinds_of_failure(words, kind):
    assert simulated.kind_of(words) == kind


def test_what_an_error_says_begins_where_it_names_the_kernel():
    inner = SimulationError("acme:add", "RACE DETECTED\n  write of x")
    text = f"INTERNAL: CpuCallback error\nopmux.core.errors.SimulationError: {inner}\n\nAt:\n  somewhere.py(12)"
    assert simulated.said(RuntimeError(text)) == (
        "acme:add: failed in the simulator of its device: RACE DETECTED\n  write of x"
    )


def test_one_case_of_a_real_backend_end_to_end():
    pytest.importorskip("opmux.plugins.mosaic_tpu")
    plugins = () if "mosaic_tpu" in registry.backends() else ("opmux.plugins.mosaic_tpu",)
    jobs = [
        simulate.SimulateJob(
            backend="mosaic_tpu", op="add", case=case, platform="tpu", plugins=plugins,
            options=SimulatorOptions(dma="eager"),
        )
        for case in ("plain", "float16")
    ]  # fmt: skip
    found = {result.case: result for result in simulate.simulate(jobs, parallel=1)}
    assert found["plain"].status == "ok"
    assert 0 <= found["plain"].error <= 1
    assert found["plain"].key == "mosaic_tpu/add/plain/dma=eager cores=1"
    assert found["float16"].status == "refused"
    assert "float16" in found["float16"].words

"""What certification catches: toy kernels with one mistake each, and the mistakes that no simulator shows.

`docs/certify.md` has the same table.
"""

import importlib.util
import re
from pathlib import Path

import pytest

from opmux.certify import simulate
from opmux.certify.simulate import SimulateJob
from opmux.core import compat
from opmux.core.simulation import SimulatorOptions

PLANTED = Path(__file__).parent / "planted"
CASES = {"add": "blocks", "reduce": "blocks_last", "matmul": "float16_broad"}
ON_WAIT, EAGER = simulate.MODES["tpu"]
(GPU,) = simulate.MODES["cuda"]
MISSED = "missed"
HANG_LIMIT = 30.0

# The kind of failure that is reported, with copies that are late, and with copies that are early.
TPU = {
    ("add", ""): (MISSED, MISSED),
    ("reduce", ""): (MISSED, MISSED),
    ("add", "missing wait"): ("race", "race"),
    ("add", "slot reused too early"): ("race", "race"),
    ("add", "missing wait before a slot is stored again"): ("race", "race"),
    ("add", "missing wait at the end"): ("uninitialised", "race"),
    ("reduce", "uninitialised accumulator"): ("uninitialised", "uninitialised"),
    ("reduce", "wrong index map"): ("numerics", "numerics"),
    ("reduce", "index out of bounds"): ("out-of-bounds", "out-of-bounds"),
    ("reduce", "parallel reduction axis"): ("race", "race"),
}

# The kinds that may be reported: where TMA may leave the array, which is JAX 0.11 and newer; and before.
CLIPS = compat.gpu_simulator_clips_tma()
GPU_BUGS = {
    ("add", ""): (MISSED,),
    ("reduce", ""): (MISSED,),
    ("matmul", ""): (MISSED,),
    ("add", "missing wait for a copy"): ("race",) if CLIPS else ("barrier",),
    ("add", "slot reused too early"): ("race",) if CLIPS else ("race", "hang"),
    ("add", "missing commit before a store"): ("race",) if CLIPS else (MISSED,),
    ("add", "missing wait before a slot is stored again"): ("race",) if CLIPS else (MISSED,),
    ("add", "wrong index"): ("numerics",),
    ("add", "index out of bounds"): ("numerics",) if CLIPS else ("hang", "out-of-bounds"),
    ("reduce", "uninitialised accumulator"): ("uninitialised",),
    ("reduce", "two warpgroups on one tile"): ("race",),
    ("matmul", "missing wait for a product"): (MISSED,),
}


def job(platform, op, bug, options):
    module = {"tpu": "planted_tpu", "cuda": "planted_gpu"}[platform]
    return SimulateJob(
        backend=module, op=op, case=CASES[op], options=options, platform=platform, config={"bug": bug},
        plugins=(module,),
    )  # fmt: skip


def kinds(jobs):
    """The kind of failure of each job, in their order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLANTED)
        # By one child, which has started once the first job, a kernel that is right, is done.
        found = [(result, result.kind if result.status != "ok" else MISSED) for result in in_order(jobs)]
    assert all(result.words for result, kind in found if kind != MISSED)
    return found


def in_order(jobs):
    return list(simulate.simulate(jobs, parallel=1, limit=HANG_LIMIT))


@pytest.fixture(scope="module")
def tpu():
    jobs = [job("tpu", op, bug, options) for op, bug in TPU for options in (ON_WAIT, EAGER)]
    jobs.append(job("tpu", "add", "lost signal", ON_WAIT))
    return kinds(jobs)


@pytest.fixture(scope="module")
def gpu():
    if importlib.util.find_spec("absl") is None:
        pytest.skip("Pallas' GPU half needs absl-py")
    jobs = [job("cuda", op, bug, GPU) for op, bug in GPU_BUGS]
    jobs.append(job("cuda", "add", "missing wait before a slot is stored again", SimulatorOptions(tma_threads=1)))
    jobs.append(job("cuda", "add", "lost signal", GPU))
    return kinds(jobs)


@pytest.mark.parametrize(("op", "bug"), TPU, ids=" ".join)
def test_bugs_of_tpu_kernels(tpu, op, bug):
    at = 2 * list(TPU).index((op, bug))
    assert (tpu[at][1], tpu[at + 1][1]) == TPU[op, bug]
    for result, kind in tpu[at : at + 2]:
        assert result.case == CASES[op]
        assert (f"planted_tpu:{op}" in result.words) == (kind in ("race", "out-of-bounds"))
        if kind == "race":
            assert re.search(r"(read|write) of .*planted_tpu.py|(read|write) of .*pallas", result.words)


def test_a_lost_signal_is_a_hang_and_ends(tpu):
    result, kind = tpu[-1]
    assert (result.status, kind) == ("timeout", "hang")
    assert "waits for a signal that nothing sends" in result.words


@pytest.mark.parametrize(("op", "bug"), GPU_BUGS, ids=" ".join)
def test_bugs_of_gpu_kernels(gpu, op, bug):
    assert gpu[list(GPU_BUGS).index((op, bug))][1] in GPU_BUGS[op, bug]


def test_few_unordered_copies_hide_a_slot_that_is_stored_again(gpu):
    assert gpu[-2][1] == MISSED


def test_a_lost_signal_on_a_gpu_is_a_hang_and_ends(gpu):
    assert gpu[-1][1] == "hang"

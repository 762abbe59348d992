"""What certification catches: toy kernels with one mistake each, and the mistakes that no simulator shows.

`docs/certify.md` has the same table.
"""

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
HANG_LIMIT = 15.0

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
    ("add", "missing wait for a copy"): ("race", "barrier") if CLIPS else ("barrier",),
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
    """Each result, with the kind of its failure, in the order of the jobs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PLANTED)
        # By one child, which has started once the first job, a kernel that is right, is done.
        results = list(simulate.simulate(jobs, parallel=1, limit=HANG_LIMIT))
    found = [(result, result.kind if result.status != "ok" else MISSED) for result in results]
    assert all(result.words for result, kind in found if kind != MISSED)
    return found


# One test a platform: workers that shared its jobs would each do all of them.
def test_bugs_of_tpu_kernels():
    jobs = [job("tpu", op, bug, options) for op, bug in TPU for options in (ON_WAIT, EAGER)]
    *found, (lost, lost_kind) = kinds([*jobs, job("tpu", "add", "lost signal", ON_WAIT)])
    assert {bug: (found[2 * n][1], found[2 * n + 1][1]) for n, bug in enumerate(TPU)} == TPU
    for one, (result, kind) in zip(jobs, found, strict=True):
        assert result.case == CASES[one.op]
        assert (f"planted_tpu:{one.op}" in result.words) == (kind in ("race", "out-of-bounds"))
        if kind == "race":
            assert re.search(r"(read|write) of .*planted_tpu.py|(read|write) of .*pallas", result.words)
    assert (lost.status, lost_kind) == ("timeout", "hang")
    assert "waits for a signal that nothing sends" in lost.words


def test_bugs_of_gpu_kernels():
    pytest.importorskip("absl", reason="Pallas' GPU half needs absl-py")
    jobs = [job("cuda", op, bug, GPU) for op, bug in GPU_BUGS]
    few = job("cuda", "add", "missing wait before a slot is stored again", SimulatorOptions(tma_threads=1))
    *found, (_, with_few_threads), (_, lost) = kinds([*jobs, few, job("cuda", "add", "lost signal", GPU)])
    wrong = {bug: kind for bug, (_, kind) in zip(GPU_BUGS, found, strict=True) if kind not in GPU_BUGS[bug]}
    assert wrong == {}
    assert with_few_threads == MISSED  # few unordered copies hide a slot that is stored again
    assert lost == "hang"

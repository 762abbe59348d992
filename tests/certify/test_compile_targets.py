"""The real compilers, for devices that are not there: each outcome by a kernel that has it."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from opmux import registry
from opmux.certify import compiling
from opmux.certify.functions import compile_function
from opmux.certify.job import CompileJob, Workload

WORKLOAD = Workload(name="f32", args={"x": "f32[4096,4096]", "y": "f32[4096,4096]"})
HALF = Workload(name="f16", args={"x": "f16[4096,4096]", "y": "f16[4096,4096]"})
COLUMN = Workload(name="column", args={"x": "f32[4096,4096]", "y": "f32[4096,1]"})
NARROW = Workload(name="narrow", args={"x": "f32[4096,256]", "y": "f32[4096,256]"})
WIDE = Workload(name="wide", args={"x": "f32[4096,512]", "y": "f32[4096,512]"})
ALLOWED = WORKLOAD.model_copy(update={"name": "allowed", "allowed_spills": {"tpu-v6e": 10**6}})

TPUS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x")
GPUS = ("h100", "h200", "b200")

needs_tpu = pytest.mark.skipif(bool(compiling.missing("tpu-v6e")), reason=compiling.missing("tpu-v6e"))
needs_gpu = pytest.mark.skipif(bool(compiling.missing("h200")), reason=compiling.missing("h200"))


def job(target, what="plain", workload=WORKLOAD, **fields):
    return CompileJob(
        backend="toy", op="add", workload=workload, target=target, config={"what": what}, plugins=("certify_toys",),
        **fields,
    )  # fmt: skip


def compiled(jobs, **options):
    found = list(compiling.compile_jobs(jobs, **options))
    assert len(found) == len(jobs)
    return {(result.target, result.workload, result.config.get("what", "")): result for result in found}


@pytest.fixture(scope="module")
def on_tpu(toys, tmp_path_factory):
    jobs = [job(target) for target in TPUS]
    jobs += [job("tpu-v6e", what) for what in ("two", "vmem", "spill", "branch")]
    jobs += [job("tpu-v6e", "abort", HALF), job("tpu-v6e", workload=HALF), job("tpu-v6e", workload=COLUMN)]
    jobs += [job("tpu-v6e", "spill", ALLOWED)]
    jobs += [job("tpu-v5e", dump=str(tmp_path_factory.mktemp("dump")))]
    return compiled(jobs[:-1]), compiled(jobs[-1:])


@pytest.fixture(scope="module")
def on_gpu(toys):
    jobs = [job(target, workload=NARROW) for target in GPUS]
    jobs += [job("h200", "tma", NARROW), job("h200", "smem", WIDE), job("h200", "wgmma"), job("b200", "wgmma")]
    jobs += [job("h200", "trade", NARROW)]
    return compiled(jobs)


@pytest.mark.slow
@needs_tpu
@pytest.mark.parametrize("target", TPUS)
def test_every_tpu_compiles_and_is_measured(on_tpu, target):
    result = on_tpu[0][target, "f32", "plain"]
    assert (result.status, result.words, result.lowered) == ("ok", "", ("tpu_custom_call",))
    (kernel,) = result.kernels
    figures = kernel.figures
    assert kernel.kernel == "toy_plain"
    assert figures["bundles"] > figures["bundles@1"] > 100
    # Three windows of 512 KiB, each double buffered.
    assert 6 * 2**19 <= figures["vmem_bytes"] < 7 * 2**19
    assert (figures["spills"], figures["fills"]) == (0, 0)
    assert figures["valu"] >= 256 * 512 / 1024  # one addition for each register of 1024 numbers
    assert figures["salu"] > 0
    assert result.hbm_bytes == 3 * 4096 * 4096 * 4
    assert result.flops == 4096 * 4096
    assert result.estimate.bound == "memory"
    assert (target == "tpu-v4") == ("estimated_cycles" not in figures and not kernel.warnings)
    assert figures["bundle_cycles"] > figures["bundles@1"] * 127


@pytest.mark.slow
@needs_tpu
def test_cycles_of_tpu_kernels_are_the_compilers_own_unless_they_cannot_be_trusted(on_tpu):
    plain = on_tpu[0]["tpu-v6e", "f32", "plain"].kernels[0]
    # 201 MB take 123 µs at the declared bandwidth; the estimator gives every stream all of it.
    assert 60_000 < plain.figures["estimated_cycles"] < 200_000
    branch = on_tpu[0]["tpu-v6e", "f32", "branch"].kernels[0]
    assert "estimated_cycles" not in branch.figures
    assert "depends on data in SMEM" in branch.warnings[0]
    # The transpose between them would abort the estimator; each is estimated alone.
    two = on_tpu[0]["tpu-v6e", "f32", "two"]
    assert {kernel.kernel: "estimated_cycles" in kernel.figures for kernel in two.kernels} == {
        "toy_first": True,
        "toy_second": True,
    }


@pytest.mark.slow
@needs_tpu
def test_what_tpu_compilers_refuse_is_in_their_words(on_tpu):
    found, _ = on_tpu
    vmem = found["tpu-v6e", "f32", "vmem"]
    assert vmem.status == "failed"
    assert "Allocation (size=268435456) would exceed memory" in vmem.words
    half = found["tpu-v6e", "f16", "plain"]
    assert half.status == "failed"
    assert "Invalid vector type for load" in half.words
    column = found["tpu-v6e", "column", ""]
    assert (column.status, column.words) == ("refused", "shape: x f32[4096,4096] and y f32[4096,1] differ")
    aborted = found["tpu-v6e", "f16", ""]
    assert (aborted.status, aborted.words) == (
        "aborted",
        "SIGABRT: LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.toy",
    )


@pytest.mark.slow
@needs_tpu
def test_a_spill_is_a_failure_unless_it_is_allowed(on_tpu):
    spill = on_tpu[0]["tpu-v6e", "f32", "spill"]
    figures = spill.kernels[0].figures
    assert figures["spills"] > 0
    assert spill.status == "failed"
    assert f"kernel toy_spill spills registers: {figures['spills']:.0f} vector stores to spill slots" in spill.words
    allowed = on_tpu[0]["tpu-v6e", "allowed", "spill"]
    assert (allowed.status, allowed.words) == ("ok", "")
    assert allowed.kernels[0].figures["spills"] == figures["spills"]


@pytest.mark.slow
@needs_tpu
def test_tpu_texts_are_kept_where_asked(on_tpu):
    (result,) = on_tpu[1].values()
    files = result.kernels[0].files
    assert set(files) == {"llo", "slots", "allocations", "mosaic"}
    assert "vadd" in Path(files["llo"]).read_text()
    assert "toy_plain" in Path(files["mosaic"]).read_text()
    assert not on_tpu[0]["tpu-v5e", "f32", "plain"].kernels[0].files


@pytest.mark.slow
@needs_tpu
def test_the_second_time_comes_from_the_cache(on_tpu):
    first = on_tpu[0]["tpu-v5p", "f32", "plain"]
    again = compiled([job("tpu-v5p")])["tpu-v5p", "f32", "plain"]
    assert again.cached
    assert again.model_copy(update={"cached": False, "seconds": 0.0}) == first.model_copy(update={"seconds": 0.0})
    assert not compiled([job("tpu-v5p")], cached=False)["tpu-v5p", "f32", "plain"].cached


@pytest.mark.slow
@needs_gpu
@pytest.mark.parametrize("target", GPUS)
def test_every_gpu_compiles_and_is_measured(on_gpu, target):
    result = on_gpu[target, "narrow", "plain"]
    assert (result.status, result.words, result.lowered) == ("ok", "", ("mosaic_gpu_v2",))
    (kernel,) = result.kernels
    assert kernel.kernel == "toy_direct"
    figures = kernel.figures
    assert 0 < figures["registers"] <= 255
    assert (figures["spill_store_bytes"], figures["spill_load_bytes"], figures["LDL"], figures["STL"]) == (0, 0, 0, 0)
    assert figures["LDG"] > 0
    assert figures["instructions"] > figures["LDG"] + figures["STG"]
    assert result.hbm_bytes == 3 * 4096 * 256 * 4
    assert result.estimate.memory_seconds == pytest.approx(
        result.hbm_bytes / {"h100": 3.35e12, "h200": 4.8e12, "b200": 7.7e12}[target]
    )
    assert result.estimate.schedule_seconds == 0


@pytest.mark.slow
@needs_gpu
def test_tma_and_wgmma_are_counted(on_gpu):
    tma = on_gpu["h200", "narrow", "tma"].kernels[0].figures
    assert (tma["tma_loads"], tma["tma_stores"]) == (2, 1)
    assert (tma["UTMALDG"], tma["UTMASTG"] + tma.get("UBLKCP", 0)) == (2, 1)
    assert tma["mbarrier_waits"] >= 1
    assert "LDG" not in tma
    assert 3 * 64 * 256 * 4 <= tma["smem_dynamic_bytes"] < 3 * 64 * 256 * 4 + 2048
    wgmma = on_gpu["h200", "f32", "wgmma"]
    figures = wgmma.kernels[0].figures
    assert (figures["wgmma"], figures["tma_loads"], figures["tma_stores"]) == (8, 12, 4)
    assert (figures["HGMMA"], figures["UTMALDG"], figures["UTMASTG"]) == (8, 12, 4)
    assert figures["threads"] == 384


@pytest.mark.slow
@needs_gpu
def test_a_kernel_that_spills_where_registers_cannot_be_traded_fails(on_gpu):
    trade = on_gpu["h200", "narrow", "trade"]
    figures = trade.kernels[0].figures
    assert (figures["setmaxnreg"], figures["spill_store_bytes"], figures["spill_load_bytes"]) == (2, 0, 0)
    assert (figures["fixed_registers"], figures["fixed_spill_bytes"] > 0) == (168, True)
    assert trade.status == "failed"
    assert f"{figures['fixed_spill_bytes']:.0f} bytes stored and loaded a thread where setmaxnreg" in trade.words
    wgmma = on_gpu["h200", "f32", "wgmma"].kernels[0].figures
    assert (wgmma["fixed_registers"] <= 168, wgmma["fixed_spill_bytes"]) == (True, 0)
    assert "fixed_registers" not in on_gpu["h200", "narrow", "tma"].kernels[0].figures


@pytest.mark.slow
@needs_gpu
def test_what_gpu_compilers_refuse_is_in_their_words(on_gpu):
    smem = on_gpu["h200", "wide", "smem"]
    assert smem.status == "failed"
    assert "exceeds available shared memory" in smem.words
    # A kernel of Hopper for Blackwell: an error, or an abort of the compiler, by version.
    (wgmma,) = (result for (target, name, _), result in on_gpu.items() if (target, name) == ("b200", "f32"))
    assert wgmma.status in ("failed", "aborted")
    assert "wgmma" in wgmma.words


def loss(x, y, w):
    return jnp.sum(jnp.tanh(registry.get("add")(x, y) @ w))


@pytest.mark.parametrize(
    ("target", "call"),
    [
        pytest.param("tpu-v6e", "tpu_custom_call", marks=needs_tpu),
        pytest.param("h200", "mosaic_gpu_v2", marks=needs_gpu),
    ],
)
def test_a_whole_function(toys, isolated_registry, target, call):
    import certify_toys

    registry.register(certify_toys)
    x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
    result = compile_function(
        jax.grad(loss, argnums=(0, 2)), x, x, jax.ShapeDtypeStruct((512, 8), jnp.float32), target=target
    )
    assert (result.status, result.words) == ("ok", "")
    assert result.custom_calls == (call,)
    assert result.backends == {"add": ("toy",), "add_vjp": ("reference",)}
    assert [kernel.kernel for kernel in result.kernels] == ["toy_plain" if target == "tpu-v6e" else "toy_direct"]
    assert result.memory["results"] >= 4096 * 512 * 4
    assert result.target == target


@needs_tpu
def test_what_cannot_be_compiled_whole(toys, isolated_registry):
    import certify_toys

    registry.register(certify_toys)

    def large(x):
        with registry.use(backend={"add": "toy"}):
            return registry.get("add", config={"what": "vmem"})(x, x)

    start = time.monotonic()
    result = compile_function(large, jax.ShapeDtypeStruct((4096, 4096), jnp.float32), target="tpu-v6e")
    assert result.status == "failed"
    assert "vmem" in result.words
    assert time.monotonic() - start < 120

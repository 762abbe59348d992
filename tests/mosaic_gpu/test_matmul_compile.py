"""The matrix product by the real compiler, for devices that are not there: every kind of operands and of config."""

import jax
import jax.numpy as jnp
import pytest

from opmux import registry
from opmux.certify import compiling
from opmux.certify.functions import compile_function
from opmux.certify.job import CompileJob, Workload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(compiling.missing("h200")), reason=compiling.missing("h200")),
]


def workload(name, a, b, **params):
    return Workload(name=name, args={"a": a, "b": b}, params=params)


SQUARE = workload("bf16", "bf16[4096,4096]", "bf16[4096,4096]")
OPERANDS = (
    SQUARE,
    workload("f16", "f16[1024,1024]", "f16[1024,1024]"),
    workload("f32", "f32[1024,1024]", "f32[1024,1024]"),
    workload("f32 highest", "f32[1024,1024]", "f32[1024,1024]", precision="highest"),
    workload("s8", "s8[1024,1024]", "s8[1024,1024]", preferred_element_type="int32"),
    workload("f8", "f8e4m3fn[1024,1024]", "f8e4m3fn[1024,1024]"),
    workload("bool", "bool[100,33]", "bool[33,7]"),
    workload("odd", "bf16[1001,200]", "bf16[200,1000]"),
    workload("rows", "bf16[1,4096]", "bf16[4096,4096]"),
    workload("batches", "bf16[4,1,3,64,128]", "bf16[4,2,1,128,192]"),
)
CONFIGS = (
    {"tile_m": 256, "tile_n": 128, "num_stages": 4}, {"tile_n": 192}, {"tile_n": 64, "num_stages": 8},
    {"tile_n": 128, "tile_k": 128, "num_stages": 3}, {"band": 5}, {"cluster": "m"}, {"cluster": "n"},
)  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Results of every job, by op, workload, target and config."""
    jobs = [
        CompileJob(backend="mosaic_gpu", op=op, workload=each, target="h200")
        for op in ("matmul", "matmul_vjp")
        for each in OPERANDS
        if op == "matmul" or each.name not in ("s8", "bool")
    ]
    jobs += [CompileJob(backend="mosaic_gpu", op="matmul", workload=SQUARE, target="h100")]
    jobs += [
        CompileJob(backend="mosaic_gpu", op="matmul", workload=SQUARE, target="h200", config=each) for each in CONFIGS
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPMUX_CACHE", str(tmp_path_factory.mktemp("cache")))
        found = list(compiling.compile_jobs(jobs))
    assert len(found) == len(jobs)
    return found


def test_everything_compiles_without_spills(compiled):
    for result in compiled:
        assert result.status == "ok", result
        for kernel in result.kernels:
            figures = kernel.figures
            names = ("spill_store_bytes", "spill_load_bytes", "stack_bytes", "local_bytes", "LDL", "STL")
            assert {name: figures[name] for name in names if figures.get(name)} == {}, result
            assert figures["HGMMA"] + figures.get("QGMMA", 0) + figures.get("IGMMA", 0)
            assert figures["UTMALDG"]
            assert figures["UTMASTG"]


def test_the_main_loop_is_as_short_as_it_can_be(compiled):
    found = [result for result in compiled if result.workload == "bf16" and result.config["cluster"] == "none"]
    found = [result for result in found if (result.config["tile_n"], result.config["band"]) == (256, 16)]
    assert {result.target for result in found} == {"h100", "h200"}
    assert {result.op for result in found} == {"matmul", "matmul_vjp"}
    for kernel in (kernel for result in found for kernel in result.kernels):
        figures = kernel.figures
        assert (figures["HGMMA"], figures["UTMALDG"], figures["UTMASTG"]) == (4, 4, 4)
        assert figures["instructions"] <= 650


@pytest.mark.parametrize("in_axes", [(0, 0), (0, None)])
def test_it_compiles_under_vmap_and_grad(in_axes):
    def loss(a, b):
        out = registry.get("matmul", backend="mosaic_gpu")(a, b)
        return jnp.sum(out.astype(jnp.float32) ** 2)

    batch = [(8,) if axis == 0 else () for axis in in_axes]
    a, b = (jax.ShapeDtypeStruct((*each, 256, 256), jnp.bfloat16) for each in batch)
    result = compile_function(jax.vmap(jax.grad(loss, (0, 1)), in_axes), a, b, target="h200")
    assert result.status == "ok", result
    assert len(result.kernels) == 3

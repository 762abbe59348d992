"""Workloads, jobs and the cache: what needs no compiler."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux import registry
from opmux.certify import cache, compiling, program, run, workloads
from opmux.certify.job import CompileJob, Workload, abstract
from opmux.certify.kernels import pallas_calls
from opmux.certify.results import CompileResult
from opmux.core.errors import SettingError, UnknownDeviceError
from opmux.core.request import ArraySpec

OPS = ("add", "reduce", "matmul", "attention", "chunk_fwd_h")


@pytest.mark.parametrize("name", OPS)
def test_every_workload_is_a_request_forward_and_backward(name):
    op = registry.ops()[name]
    full = workloads.workloads(op, "full")
    quick = workloads.workloads(op, "quick")
    assert quick == full[: len(quick)]
    assert 2 <= len(quick) <= 3
    assert len({each.name for each in full}) == len(full) > len(quick)
    for each in full:
        forward = program.request(op, job(op=name, workload=each))
        assert forward.op == name
        assert op.cost(forward).bytes > 0
        backward = program.request(op, job(op=f"{name}_vjp", workload=each))
        assert backward.op == f"{name}_vjp"
        assert set(backward.wanted) <= set(op.differentiable)


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning")  # 64 bits are off
@pytest.mark.parametrize("name", OPS)
def test_an_op_without_workloads_is_compiled_for_its_cases(name, monkeypatch):
    op = registry.ops()[name]
    monkeypatch.setattr(workloads, "_WORKLOADS", {})
    assert len(workloads.workloads(op, "quick")) == workloads.FROM_CASES
    for each in workloads.workloads(op, "full"):
        copied = Workload.model_validate_json(each.model_dump_json())
        assert program.request(op, job(op=name, workload=copied)).op == name
    workloads.add(name, [each])
    assert workloads.workloads(op, "full") == (each,)


def test_packed_sequences_keep_their_offsets():
    op = registry.ops()["chunk_fwd_h"]
    packed = next(each for each in workloads.workloads(op, "quick") if "cu_seqlens" in each.args)
    asked = program.request(op, job(op="chunk_fwd_h", workload=packed))
    starts = np.asarray(packed.args["cu_seqlens"])
    assert asked["cu_seqlens"].shape == starts.shape
    chunks = int(np.sum(-(-np.diff(starts) // 64)))
    assert op.outputs(asked)["h"].shape[1] == chunks


@pytest.mark.parametrize("text", ["bf16[2,1024,8,128]", "f32[]", "s8[7]", "bool[3,0]", "float8_e4m3fn[4]", "u16[1]"])
def test_abstract_arrays_are_read_back(text):
    assert str(ArraySpec.of(abstract(text))) == text
    assert abstract("bfloat16[ 2, 3 ]") == jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)


@pytest.mark.parametrize("text", ["f32", "f32[2", "f32[a]", "f31[2]", "f32[2,]", "[2]"])
def test_other_text_is_no_array(text):
    with pytest.raises(SettingError):
        abstract(text)


def test_targets_that_nobody_compiles_for():
    with pytest.raises(UnknownDeviceError, match=r"a100.*tpu-v6e"):
        compiling.compile_jobs([job(target="a100")])
    with pytest.raises(UnknownDeviceError):
        compiling.missing("cpu")


def test_a_missing_compiler_is_one_line(monkeypatch):
    monkeypatch.setattr(compiling, "_installed", lambda module: False)
    monkeypatch.setattr(compiling, "_tool", lambda name: False)
    lacks = "compiling for tpu-v6e needs libtpu, flatbuffers: pip install 'opmux[certify]'"
    assert compiling.missing("tpu-v6e") == lacks
    with pytest.raises(compiling.MissingCompilerError, match=r"^compiling for h200 needs .*ptxas.*opmux\[certify\]'$"):
        compiling.compile_jobs([job(target="h200")])


def test_the_cache_returns_what_was_kept_and_survives_damage(tmp_path, monkeypatch):
    monkeypatch.setenv("OPMUX_CACHE", str(tmp_path))
    result = CompileResult(backend="b", op="add", workload="w", target="h200", status="ok", flops=3.0)
    key = cache.key("text", "h200", {})
    assert cache.load(key) is None
    cache.save(key, result)
    assert cache.load(key) == result
    (path,) = (tmp_path / "certify").iterdir()
    for damage in ("", "{", json.dumps({"backend": 1}), "[]"):
        path.write_text(damage)
        assert cache.load(key) is None
    monkeypatch.setenv("OPMUX_CACHE", str(path))  # a file: nothing can be kept there, and nothing is said
    cache.save(key, result)


def test_the_key_tells_texts_targets_flags_and_versions_apart(monkeypatch):
    keys = {cache.key("a", "h100", {}), cache.key("b", "h100", {}), cache.key("a", "h200", {})}
    keys |= {cache.key("a", "h100", {"f": "1"}), cache.key("a", "h100", {"f": "2"})}
    monkeypatch.setattr(cache, "versions", lambda: {"libtpu": "9"})
    keys.add(cache.key("a", "h100", {}))
    assert len(keys) == 6


def test_kernels_are_found_in_a_program_and_data_that_branches_depend_on(toys):
    from certify_toy_kernels import TPU

    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)

    def run(x, y):
        return jax.lax.fori_loop(0, 2, lambda _, x: TPU["branch"](TPU["plain"](x, y), y), x)

    found = list(pallas_calls(jax.jit(run).trace(x, x).jaxpr))
    assert [(call.name, call.steps, call.data_dependent) for call in found] == [
        ("toy_plain", 4, False),
        ("toy_branch", 8, True),
    ]


def test_a_kernel_without_a_name_is_called_after_its_scope_as_the_compiler_calls_it():
    from jax.experimental import pallas as pl

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def run(x):
        for block in (128, 256):
            with jax.named_scope(f"copy_block={block}"):
                x = pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return x

    found = pallas_calls(jax.jit(run).trace(jax.ShapeDtypeStruct((8, 256), jnp.float32)).jaxpr)
    assert [call.name for call in found] == ["copy_block_128", "copy_block_256"]


def job(op="add", workload=None, target="tpu-v6e", **fields):
    workload = workload or Workload(name="w", args={"x": "f32[8,128]", "y": "f32[8,128]"})
    return CompileJob(backend="toy", op=op, workload=workload, target=target, **fields)


def test_variants_are_compiled_for_the_main_target_of_a_platform_or_for_those_that_are_named(monkeypatch):
    monkeypatch.setattr(run.compiling, "missing", lambda target: "")
    every, _ = run._programs(["mosaic_tpu"], ["matmul"], None, "full", None)
    named, _ = run._programs(["mosaic_tpu"], ["matmul"], ["tpu-v4", "tpu-v6e"], "full", None)
    on = {
        job.workload.name: {each.target for each in every if each.workload.name == job.workload.name} for job in every
    }
    assert on["bf16 1024"] == {"tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"}
    assert on["bf16 2048"] == {"tpu-v6e"}
    assert {job.workload.estimate for job in every if job.target != "tpu-v6e"} == {False}
    assert {job.target for job in named if job.workload.name == "bf16 2048"} == {"tpu-v4", "tpu-v6e"}
    assert all(job.workload.estimate for job in named if job.workload.name == "bf16 1024")

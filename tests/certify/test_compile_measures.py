"""Parsers of what compilers dump, on samples cut from real dumps."""

import pytest

from opmux.certify import measure_gpu, measure_tpu, roofline
from opmux.core.devices import device


def test_tpu_bundles_by_loop_depth_and_slots_by_unit(sample):
    found = measure_tpu.figures(sample("tpu_v5e.final_bundles.txt"), sample("tpu_v5e.utilization.txt"))
    assert (found["bundles"], found["bundles@1"], found["bundles@2"]) == (17, 8, 4)
    # Summed by hand from the table.
    assert (found["salu"], found["salu@1"], found["salu@2"]) == (18, 10, 5)
    assert (found["xlu"], found["xlu@1"], found["valu"], found["vload"], found["vstore"]) == (7, 7, 12, 22, 2)
    assert (found["fills"], found["spills"]) == (0, 0)
    assert "vmem_bytes" not in found
    assert "mxu" not in found


def test_tpu_columns_are_read_by_the_header(sample):
    llo = "   0x1   :  { nop }\n   0x2   : > { nop }\n   0x3   : > { nop }\n"
    found = measure_tpu.figures(llo, sample("tpu_two_matrix_columns.utilization.txt"))
    assert (found["matmul"], found["matpush"], found["valu"], found["salu"]) == (2, 2, 2, 3)
    assert (found["fills"], found["spills"], found["fills@1"], found["spills@1"]) == (3, 2, 3, 2)


def test_tpu_tables_of_different_length_keep_their_sums(sample):
    found = measure_tpu.figures("   0x1   : > { nop }\n", sample("tpu_two_matrix_columns.utilization.txt"))
    assert (found["bundles"], found["salu"]) == (1, 3)
    assert "salu@1" not in found


def test_tpu_memory_spans_the_allocations(sample):
    # Scratch of 256 KiB and three windows of 256 KiB, one after another; one word of scalar memory.
    assert measure_tpu.memory(sample("tpu_v6e.allocations.txt")) == {"vmem_bytes": 4 * 2**18, "smem_bytes": 4}
    assert measure_tpu.memory("") == {}


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("17-mm.1-03-final_bundles.txt", ("mm.1", "llo")),
        ("17-a-b_c.12-01-final_hlo-static-per-bundle-utilization.txt", ("a-b_c.12", "slots")),
        ("17-mm.1-00-post-delay-converter.txt", ("mm.1", "allocations")),
        ("17-mm.1-02-schedule-analysis_final_bundles.txt", None),
        ("17-<late-finalization>-03-final_bundles.txt", None),
        ("17-TLP-hlo.txt", None),
    ],
)
def test_tpu_dumped_files(file, what):
    assert measure_tpu.dumped(file) == what


def test_tpu_kernels_are_named_by_their_ops():
    hlo = (
        '  %mm.1 = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={}\n'
        '  ROOT %mm.2 = f32[8]{0} custom-call(%mm.1), custom_call_target="tpu_custom_call"\n'
        '  %other.3 = f32[8]{0} custom-call(%x), custom_call_target="Sharding"\n'
        '  add.7 = (f32[8], f32[8]) custom-call(%x), custom_call_target="tpu_custom_call"\n'
    )
    ops = measure_tpu.custom_calls(hlo)
    assert ops == ["mm.1", "mm.2", "add.7"]
    assert measure_tpu.kernel_names(ops) == {"mm.1": "mm.1", "mm.2": "mm.2", "add.7": "add"}


def test_tpu_cycles():
    assert measure_tpu.estimated_cycles("hlo_op_estimate {\n  estimated_cycles: 87531\n}") == 87531
    assert measure_tpu.estimated_cycles("") == 0
    assert measure_tpu.bundle_cycles({"bundles": 30.0, "bundles@1": 20.0}, 8) == {"bundle_cycles": 170}
    assert measure_tpu.bundle_cycles({"bundles": 30.0, "bundles@1": 20.0, "bundles@2": 5.0}, 8) == {}
    assert measure_tpu.bundle_cycles({"bundles": 30.0}, None) == {}


def test_gpu_figures(sample):
    found = measure_gpu.figures(
        sample("hopper.ptxas"), sample("hopper.ptx"), sample("hopper.sass_ctrl"), sample("hopper.passes.mlir")
    )
    expected = {
        "registers": 168, "barriers": 16, "stack_bytes": 0, "spill_store_bytes": 0, "spill_load_bytes": 0,
        "local_bytes": 0, "smem_static_bytes": 1, "smem_dynamic_bytes": 229440, "threads": 384,
        "wgmma": 8, "tma_loads": 12, "tma_stores": 4, "mbarrier_waits": 7, "mbarrier_arrivals": 13, "stmatrix": 16,
        "setmaxnreg": 2, "HGMMA": 8, "UTMALDG": 12, "UTMASTG": 4, "STSM": 16, "LDL": 0, "STL": 0, "LDG": 4,
        "narrow_global": 4,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert found["instructions"] == 48  # 51 lines, of which 3 are padding


def test_gpu_figures_without_a_disassembler_or_passes(sample):
    found = measure_gpu.figures(sample("hopper.ptxas"), sample("hopper.ptx"), resources=sample("hopper.resources.txt"))
    assert found["smem_dynamic_bytes"] == 229376
    assert "HGMMA" not in found


def test_gpu_code_with_fixed_registers(sample):
    ptx = sample("hopper.ptx")
    fixed = measure_gpu.with_fixed_registers(ptx)
    assert set(ptx.splitlines()) - set(fixed.splitlines()) == {
        "\tsetmaxnreg.dec.sync.aligned.u32 40;",
        "\tsetmaxnreg.inc.sync.aligned.u32 232;",
    }
    assert len(ptx.splitlines()) - len(fixed.splitlines()) == 2
    assert measure_gpu.with_fixed_registers(fixed) == ""
    report = "8 bytes stack frame, 12 bytes spill stores, 30 bytes spill loads\nptxas info : Used 168 registers\n"
    found = measure_gpu.figures(sample("hopper.ptxas"), ptx, fixed=report)
    assert (found["fixed_registers"], found["fixed_spill_bytes"], found["spill_store_bytes"]) == (168, 42, 0)
    assert "fixed_registers" not in measure_gpu.figures(sample("hopper.ptxas"), fixed)


def test_gpu_spills_and_warnings():
    report = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized\n"
        "ptxas warning : Registers are spilled to local memory in function 'k'\n"
        "ptxas info    : Function properties for k\n"
        "    64 bytes stack frame, 60 bytes spill stores, 52 bytes spill loads\n"
        "ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size\n"
    )
    found = measure_gpu.figures(report, "")
    assert (found["spill_store_bytes"], found["spill_load_bytes"], found["local_bytes"]) == (60, 52, 64)
    assert measure_gpu.warnings(report) == (
        "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized",
        "Registers are spilled to local memory in function 'k'",
    )


def test_gpu_accesses_of_16_bytes_are_not_narrow():
    sass = (
        "  -:-:-:Y:01  /*0000*/  LDG.E.128 R4, desc[UR4][R2.64] ;\n"
        "  -:-:-:Y:01  /*0010*/  @!P0 STG.E.64 desc[UR4][R2.64], R4 ;\n"
        "  -:-:-:Y:01  /*0020*/  @P1 LDL.64 R8, [R1] ;\n"
    )
    found = measure_gpu.figures("", "", sass)
    assert (found["LDG"], found["STG"], found["narrow_global"], found["LDL"]) == (1, 1, 1, 1)
    assert found["instructions"] == 3


def test_roofline_is_the_longest_of_three():
    v6e = device("tpu-v6e")
    found = roofline.estimate(v6e, flops=918e12, hbm_bytes=1638e9 * 3, dtype="bf16", cycles=1.75e9 * 2)
    assert found.compute_seconds == pytest.approx(1)
    assert found.memory_seconds == pytest.approx(3)
    assert found.schedule_seconds == pytest.approx(2, rel=1e-3)
    assert (found.seconds, found.bound) == (found.memory_seconds, "memory")
    unknown = roofline.estimate(v6e, flops=1e12, hbm_bytes=1e6, dtype="int4")
    assert (unknown.compute_seconds, unknown.bound) == (0, "memory")


@pytest.mark.parametrize(
    ("name", "gigahertz"), [("tpu-v4", 1.05), ("tpu-v5e", 1.5), ("tpu-v5p", 1.75), ("tpu-v6e", 1.75), ("h200", 0)]
)
def test_clocks(name, gigahertz):
    assert roofline.clock(device(name)) == pytest.approx(gigahertz * 1e9, rel=0.01)

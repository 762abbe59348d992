"""Products that the backend refuses, and why; blocks that it chooses; and passes of the matrix units, compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from opmux import certify
from opmux.certify import compiling
from opmux.core import devices
from opmux.core.op import backward_request
from opmux.core.ops.matmul import OP
from opmux.plugins import mosaic_tpu
from opmux.plugins.mosaic_tpu.matmul_blocks import plan
from opmux.plugins.mosaic_tpu.matmul_layout import layout

IMPLEMENTATIONS = {found.op: found for found in mosaic_tpu.opmux_implementations()}
TPUS = [devices.device(name) for name in devices.names() if name.startswith("tpu")]
BY_NAME = {device.name: device for device in TPUS}
BF16 = jnp.bfloat16


def request(a, b, dtype=np.float32, b_dtype=None, **kwargs):
    shapes = (jax.ShapeDtypeStruct(a, dtype), jax.ShapeDtypeStruct(b, dtype if b_dtype is None else b_dtype))
    return OP.request(shapes, kwargs)


def reasons(dtype, b_dtype=None, device="tpu-v6e", **kwargs):
    asked = request((8, 128), (128, 8), dtype, b_dtype, **kwargs)
    return IMPLEMENTATIONS["matmul"].supports(asked, BY_NAME[device])


@pytest.mark.parametrize("device", BY_NAME)
def test_what_every_generation_takes(device):
    for precision in (None, "default", "high", "highest", ("default", "highest"), "BF16_BF16_F32_X6", "F32_F32_F32"):
        assert not reasons(np.float32, device=device, precision=precision)
    assert not reasons(BF16, device=device)
    assert not reasons(BF16, np.float32, device=device)
    assert not reasons(BF16, np.int8, device=device)
    for dtype in ("int32", "int16", "int8", "float32", BF16):
        assert not reasons(np.int8, device=device, preferred_element_type=dtype)


@pytest.mark.parametrize(
    ("dtype", "kwargs", "code", "word"),
    [
        (np.float16, {}, "dtype", "loads no float16"),
        (np.int16, {}, "dtype", "multiplies no int16"),
        (np.int32, {}, "dtype", "multiplies no int32"),
        (np.uint8, {}, "dtype", "multiplies no uint8"),
        (np.bool_, {}, "dtype", "multiplies no bool"),
        (np.complex64, {}, "dtype", "have no complex64"),
        (jnp.float8_e4m3fn, {}, "dtype", "multiplies no float8_e4m3fn"),
        (np.float32, {"preferred_element_type": np.float16}, "dtype", "loads no float16"),
        (np.float32, {"preferred_element_type": np.complex64}, "dtype", "have no complex64"),
        (np.float32, {"precision": "TF32_TF32_F32"}, "precision", "TF32_TF32_F32"),
        (np.float32, {"precision": lax.DotAlgorithmPreset.BF16_BF16_F32_X9}, "precision", "BF16_BF16_F32_X9"),
    ],
)
def test_what_it_refuses(dtype, kwargs, code, word):
    (reason,) = reasons(dtype, **kwargs)
    assert reason.code == code
    assert word in reason.detail
    assert "backend xla" in reason.hint


def test_backward_refuses_what_the_forward_does():
    with jax.enable_x64(True):
        asked = request((8, 128), (128, 8), np.float64)
        for op, each in (("matmul", asked), ("matmul_vjp", backward_request(OP, asked))):
            assert {reason.code for reason in IMPLEMENTATIONS[op].supports(each, TPUS[0])} == {"dtype"}
    asked = request((8, 128), (128, 8), np.float32, preferred_element_type=np.float16)
    assert IMPLEMENTATIONS["matmul_vjp"].supports(backward_request(OP, asked), TPUS[0])


def test_int8_is_multiplied_as_it_is_where_that_is_faster():
    asked = request((512, 512), (512, 512), np.int8, preferred_element_type="int32")
    native = {device.name for device in TPUS if IMPLEMENTATIONS["matmul"].config_for(asked, device).int8_unit}
    assert native == {"tpu-v5e", "tpu-v5p", "tpu-v6e"}


SHAPES = [
    ((4096, 4096), (4096, 4096)),
    ((1, 4096), (4096, 4096)),
    ((100, 4099), (4099, 1003)),
    ((4096, 4096), (4096, 1)),
    ((4096, 200), (200, 4096)),
    ((8, 1024, 512), (512, 1024)),
    ((64, 128, 128), (64, 128, 128)),
    ((3, 1 << 17), (1 << 17, 5)),
    ((0, 5), (5, 3)),
    ((2, 2049, 131), (131, 7)),
]


@pytest.mark.parametrize("device", TPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("precision", [None, "highest"])
@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_default_blocks_fit_in_vector_memory(device, a, b, precision):
    asked = request(a, b, precision=precision)
    config = IMPLEMENTATIONS["matmul"].config_for(asked, device)
    backward = IMPLEMENTATIONS["matmul_vjp"].config_for(backward_request(OP, asked), device)
    where = layout(asked["a"].shape, asked["b"].shape)
    if 0 in (*a, *b):
        return
    left, right, out = where.left, where.right, where.out
    pieces = (4, 4) if precision else (0, 0)
    plans = [
        plan(left, right, out[:-2], (config.block_m, config.block_n, config.block_k), right_transposed=where.turned),
        plan(
            out, right, left[:-2], (backward.da_block_m, backward.da_block_n, backward.da_block_k),
            right_transposed=not where.turned,
        ),
        plan(
            *((out, left) if where.turned else (left, out)), right[:-2],
            (backward.db_block_m, backward.db_block_n, backward.db_block_k), left_transposed=True,
        ),
    ]  # fmt: skip
    for found in plans:
        assert found.vmem_bytes((4, 4, 4), pieces) <= min(device.vmem_bytes - 2**21, 3 * device.vmem_bytes // 4)


def test_an_undeclared_device_gets_what_every_generation_has():
    asked = request((4096, 4096), (4096, 4096), BF16)
    cpu, v4 = (IMPLEMENTATIONS["matmul"].config_for(asked, devices.device(name)) for name in ("cpu", "tpu-v4"))
    assert cpu.block_m * cpu.block_n <= 2 * v4.block_m * v4.block_n


needs_tpu = pytest.mark.skipif(bool(compiling.missing("tpu-v6e")), reason=compiling.missing("tpu-v6e"))
UNITS = ("mxu", "matmul", "matpush")


def slots(dtype, **kwargs):
    """Slots of the matrix units in one compiled product."""
    x = jax.ShapeDtypeStruct((256, 256), dtype)
    (found,) = certify.compile("matmul", x, x, target="tpu-v6e", backend="mosaic_tpu", **kwargs)
    assert found.status == "ok", found.words
    return sum(found.kernels[0].figures.get(unit, 0) for unit in UNITS)


@pytest.mark.slow
@needs_tpu
def test_a_precision_is_so_many_passes_of_the_matrix_units():
    one = slots(BF16)
    assert slots(np.float32, precision="high") == pytest.approx(3 * one, rel=0.1)
    assert slots(np.float32, precision="highest") == pytest.approx(6 * one, rel=0.1)
    assert slots(np.float32) < 2.5 * one  # of registers of half as many elements


@pytest.mark.slow
@needs_tpu
@pytest.mark.parametrize("target", BY_NAME)
def test_compiles_without_spills(target):
    for dtype, kwargs in ((BF16, {}), (np.float32, {"precision": "highest"})):
        a, b = jax.ShapeDtypeStruct((1000, 1001), dtype), jax.ShapeDtypeStruct((1001, 520), dtype)
        (found,) = certify.compile("matmul", a, b, target=target, backend="mosaic_tpu", **kwargs)
        assert found.status == "ok", found.words

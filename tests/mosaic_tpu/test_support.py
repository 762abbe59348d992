"""What the backend refuses, and why; what it says of itself; and what its default configs ask for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core import devices
from opmux.core.ops import add, reduce
from opmux.plugins import mosaic_tpu

OPS = {"add": add.OP, "reduce": reduce.OP}
IMPLEMENTATIONS = {found.op: found for found in mosaic_tpu.opmux_implementations()}
TPUS = [devices.device(name) for name in devices.names() if name.startswith("tpu")]
MIB = 2**20


def reasons(op, *arrays, **kwargs):
    request = OPS[op].request(tuple(jax.ShapeDtypeStruct((8, 128), dtype) for dtype in arrays), kwargs)
    return IMPLEMENTATIONS[op].supports(request, TPUS[0])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32])
def test_what_both_take(dtype):
    assert not reasons("add", dtype, dtype)
    for kind in ("sum", "max", "min", "prod"):
        assert not reasons("reduce", dtype, kind=kind)


def test_short_integers_are_widened_where_they_are_reduced():
    assert not reasons("reduce", np.int8)
    assert not reasons("reduce", np.int16, kind="max")
    assert not reasons("reduce", np.int8, kind="mean")


@pytest.mark.parametrize(
    ("dtype", "word"),
    [
        (np.float16, "float16"),
        (np.int8, "int8"),
        (np.int16, "int16"),
        (np.uint8, "uint8"),
        (np.uint32, "unsigned"),
        (np.bool_, "booleans"),
        (np.complex64, "complex64"),
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
    ],
)
def test_what_add_refuses(dtype, word):
    (reason,) = reasons("add", dtype, dtype)
    assert reason.code == "dtype"
    assert word in reason.detail
    assert "float32" in reason.hint


@pytest.mark.parametrize(
    ("dtype", "kwargs", "word"),
    [
        (np.float16, {}, "float16"),
        (np.uint8, {}, "unsigned"),
        (np.bool_, {}, "booleans"),
        (np.float32, {"dtype": "float16"}, "float16"),
        (np.int32, {"kind": "mean", "dtype": "int32"}, "divide"),
        (np.float32, {"dtype": "int8"}, "int8"),
    ],
)
def test_what_reduce_refuses(dtype, kwargs, word):
    found = reasons("reduce", dtype, **kwargs)
    assert any(word in reason.detail for reason in found)
    assert all(reason.code == "dtype" and reason.hint for reason in found)


def test_64_bits_are_refused():
    with jax.enable_x64(True):
        for dtype in (np.float64, np.int64):
            (reason,) = reasons("add", dtype, dtype)
            assert reason.code == "dtype"
            assert str(np.dtype(dtype)) in reason.detail
            assert reasons("reduce", dtype)
        assert reasons("reduce", np.int8)  # widens to int64


@pytest.mark.parametrize("device", TPUS, ids=lambda device: device.name)
@pytest.mark.parametrize("shape", [(4096, 4096), (1 << 24,), (3, 5), (0, 7), (100000, 4, 16), (7, 1 << 20)])
def test_default_blocks_fit_in_vector_memory(device, shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    config = IMPLEMENTATIONS["add"].config_for(OPS["add"].request((x, x), {}), device)
    rows = min(config.block_rows, shape[-2] if len(shape) > 1 else 1)
    assert 6 * 4 * config.block_leading * rows * config.block_lanes <= config.vmem_limit_bytes
    assert config.vmem_limit_bytes <= device.vmem_bytes
    for axis in range(len(shape)):
        config = IMPLEMENTATIONS["reduce"].config_for(OPS["reduce"].request((x,), {"axis": axis}), device)
        assert 2 * 4 * max(config.block_size, config.block_r * config.block_b) <= config.vmem_limit_bytes
        assert config.vmem_limit_bytes <= device.vmem_bytes


def test_an_undeclared_device_gets_what_every_generation_has():
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    for op, arrays in (("add", (x, x)), ("reduce", (x,))):
        config = IMPLEMENTATIONS[op].config_for(OPS[op].request(arrays, {}), devices.device("cpu"))
        assert config.vmem_limit_bytes == 16 * MIB


def test_what_it_says_of_itself():
    info = mosaic_tpu.opmux_backend()
    assert (info.name, info.platforms, info.tier) == ("mosaic_tpu", ("tpu",), "kernel")
    assert info.simulator
    assert info.install_hint

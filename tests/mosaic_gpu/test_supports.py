"""What the backend refuses, before anything is traced, and in which words."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from opmux.core import devices
from opmux.plugins.mosaic_gpu.add_config import AddConfig
from opmux.plugins.mosaic_gpu.broadcast import layout
from opmux.plugins.mosaic_gpu.reduce_config import ReduceConfig


def spec(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int32])
def test_dtypes_that_are_taken(gpu, dtype):
    x = spec(4, 4, dtype=dtype)
    assert gpu("add").refusals(x, x) == []
    assert gpu("reduce").refusals(x) == []


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.bool_, np.complex64, jnp.float8_e4m3fn])
def test_dtypes_that_are_refused(gpu, dtype):
    (reason,) = gpu("add").refusals(spec(4, dtype=dtype), spec(4, dtype=dtype))
    assert (reason.code, reason.hint) == ("dtype", "cast it, or backend xla")
    assert np.dtype(dtype).name in reason.detail
    assert "dtype" in {reason.code for reason in gpu("reduce").refusals(spec(4, dtype=dtype))}


def test_64_bits_are_refused(gpu):
    with jax.enable_x64(True):
        (reason,) = gpu("add").refusals(spec(4, dtype=np.float64), spec(4, dtype=np.float64))
        # Sums of int32 widen to JAX's default integer.
        (widened,) = gpu("reduce").refusals(spec(4, dtype=np.int32))
    assert "64-bit" in reason.detail
    assert widened.detail == "int64: 64-bit elements are not taken"


@pytest.mark.parametrize("kwargs", [{"dtype": "int8"}, {"dtype": "bool"}])
def test_result_dtypes_that_are_refused(gpu, kwargs):
    (reason,) = gpu("reduce").refusals(spec(4), **kwargs)
    assert reason.code == "dtype"
    assert kwargs["dtype"] in reason.detail


def test_offsets_are_32_bit(gpu):
    (reason,) = gpu("add").refusals(spec(1 << 16, 1), spec(1, 1 << 16))
    assert (reason.code, reason.hint) == ("shape", "backend xla")
    assert str(1 << 32) in reason.detail
    (reason,) = gpu("reduce").refusals(spec(1 << 16, 1 << 16))
    assert reason.code == "shape"
    assert gpu("add").refusals(spec(1 << 20, 0), spec(1, 1)) == []


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_capabilities_that_are_taken(gpu, capability):
    device = dataclasses.replace(devices.device("h200"), compute_capability=capability)
    assert gpu("add").refusals(spec(4), spec(4), device=device) == []


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0), None])
def test_capabilities_that_are_refused(gpu, capability):
    device = dataclasses.replace(devices.device("a100"), compute_capability=capability)
    for reasons in (
        gpu("add").refusals(spec(4), spec(4), device=device),
        gpu("reduce").refusals(spec(4), device=device),
    ):
        (reason,) = reasons
        assert reason.code == "capability"
        assert "9.0 or 10.x" in reason.detail + reason.hint
        assert ("not known" if capability is None else f"{capability[0]}.{capability[1]}") in reason.detail


@pytest.mark.parametrize("schema", [AddConfig, ReduceConfig])
def test_configs_that_need_too_much_shared_memory_are_refused(schema):
    with pytest.raises(ValidationError, match="bytes of shared memory; a block has 231424 beside"):
        schema(num_stages=8)
    assert schema().smem_bytes <= 227 * 1024


def test_blocks_are_as_many_as_the_device_has_multiprocessors(gpu):
    for name, args in (("add", (spec(4), spec(4))), ("reduce", (spec(4),))):
        runner = gpu(name)
        request = runner.op.request(args, {})
        sizes = {
            kind: runner.implementation.config_for(request, devices.device(kind)).num_ctas for kind in ("h100", "b200")
        }
        assert sizes == {"h100": 132, "b200": 148}


@pytest.mark.parametrize(
    ("x", "y", "want"),
    [
        ((5, 7), (5, 7), ((), 1, 35)),
        ((5, 7), (1, 1), ((), 1, 35)),
        ((1, 5, 7), (3, 1, 1), ((), 3, 35)),
        ((5, 1, 4, 8), (5, 3, 1, 8), ((5, 3), 4, 8)),
        ((2, 3, 4), (2, 3, 1), ((), 6, 4)),
    ],
)
def test_layouts(x, y, want):
    """An operand's element lies where its strides say."""
    found = layout(x, y)
    assert (found.batch, found.rows, found.columns) == want
    for side, shape in ((found.x, x), (found.y, y)):
        numbers = np.arange(np.prod(shape)).reshape(shape)
        out = np.broadcast_to(numbers, np.broadcast_shapes(x, y)).reshape(*found.batch, found.rows, found.columns)
        own = numbers.reshape(side.shape)
        for index in np.ndindex(out.shape):
            batch = sum(i * stride for i, stride in zip(index, side.batch_strides, strict=False))
            row, column = (0 if size == 1 else i for i, size in zip(index[-2:], side.shape[1:], strict=True))
            assert own[batch, row, column] == out[index]

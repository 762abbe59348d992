"""What is decided before a matrix product runs: what is refused, the order of tiles, splitting, configs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from pydantic import ValidationError

from opmux import registry
from opmux.core import devices
from opmux.core.op import backward_request
from opmux.core.ops.matmul import OP
from opmux.plugins import mosaic_gpu
from opmux.plugins.mosaic_gpu.capability import tiled_shape
from opmux.plugins.mosaic_gpu.matmul_config import MatmulConfig
from opmux.plugins.mosaic_gpu.matmul_terms import Terms, split
from opmux.plugins.mosaic_gpu.matmul_tiles import Tiles, extent, merge_batch, operand_indices

IMPLEMENTATIONS = {found.op: found for found in mosaic_gpu.opmux_implementations()}
H200 = devices.device("h200")
BF16 = jnp.bfloat16


def spec(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_it_is_chosen_on_hopper_forward_and_backward(name):
    with registry.use(device=name):
        decision = registry.explain("matmul", spec(64, 64), spec(64, 64))
    assert decision.backend == "mosaic_gpu"


def test_blackwell_is_refused_with_the_reason():
    with registry.use(device="b200"):
        decision = registry.explain("matmul", spec(64, 64), spec(64, 64))
    assert decision.backend == "xla"
    (reason,) = decision.candidate("mosaic_gpu").reasons
    assert reason.code == "capability"
    assert reason.detail == "NVIDIA B200 has compute capability 10.0; wgmma is an instruction of 9.0 alone"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.complex64])
def test_dtypes_that_wgmma_has_not_are_refused(gpu, dtype):
    (reason,) = gpu("matmul").refusals(spec(4, 4, dtype=dtype), spec(4, 4, dtype=dtype))
    assert (reason.code, reason.detail) == ("dtype", f"wgmma does not multiply {np.dtype(dtype).name}")


@pytest.mark.parametrize(
    ("dtype", "kwargs", "code"),
    [
        (np.float32, {"precision": "F16_F16_F32"}, "precision"),
        (BF16, {"precision": "F64_F64_F64"}, "precision"),
        (np.float32, {"precision": "F32_F32_F32"}, None),
        (np.float32, {"precision": "highest"}, None),
        (np.float32, {"precision": ("default", "high")}, None),
        (np.float32, {"preferred_element_type": "complex64"}, None),
        (np.int8, {"preferred_element_type": "int32"}, None),
    ],
)
def test_precisions_and_results(gpu, dtype, kwargs, code):
    reasons = gpu("matmul").refusals(spec(4, 4, dtype=dtype), spec(4, 4, dtype=dtype), **kwargs)
    assert [reason.code for reason in reasons] == ([code] if code else [])


def test_sums_that_do_not_fit_are_refused(gpu):
    refusals = gpu("matmul").refusals
    long = spec(1, 1 << 17, dtype=np.int8), spec(1 << 17, 1, dtype=np.int8)
    assert refusals(*long) == []  # wraps, as it has to
    assert [reason.code for reason in refusals(*long, preferred_element_type="float32")] == ["shape"]
    with jax.enable_x64(True):
        assert [reason.code for reason in refusals(*long, preferred_element_type="int64")] == ["dtype"]
    assert [reason.code for reason in refusals(spec(1 << 16, 1), spec(1, 1 << 16))] == ["shape"]


def test_the_backward_refuses_what_the_forward_does_not():
    request = OP.request((spec(4, 4, dtype=np.float32),) * 2, {"preferred_element_type": "complex64"})
    reasons = IMPLEMENTATIONS["matmul_vjp"].supports(backward_request(OP, request), H200)
    assert {reason.detail for reason in reasons} == {"wgmma does not multiply complex64"}


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 5), (5, 7, 2), (6, 2, 4)])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("band", [1, 2, 4, 16])
def test_every_tile_is_taken_once(shape, cluster, band):
    G, rows, columns = shape
    tiles = Tiles(((G, 1, 1),) if G > 1 else (), rows * 128 - 1, columns * 64 - 1, 128, 64, *cluster, band)
    size = cluster[0] * cluster[1]
    taken = [
        tuple(map(int, tiles.place(jnp.int32(number), peer))) for number in range(tiles.total) for peer in range(size)
    ]
    assert len(set(taken)) == len(taken)
    everywhere = itertools.product(range(G), range(0, rows * 128 - 1, 128), range(0, columns * 64 - 1, 64))
    assert set(everywhere) <= set(taken)


def test_blocks_that_run_together_need_few_rows_and_columns():
    tiles = Tiles((), 4096, 4096, 128, 256, 1, 1, 16)
    together = [tuple(map(int, tiles.place(jnp.int32(number), 0)))[1:] for number in range(128)]
    assert (len({row for row, _ in together}), len({column for _, column in together})) == (16, 8)


@pytest.mark.parametrize(
    ("a", "b", "out"),
    [
        ((), (), ()),
        ((2, 3), (2, 3), (2, 3)),
        ((2, 3), (1, 1), (2, 3)),
        ((4, 1, 3), (4, 2, 1), (4, 2, 3)),
        ((4, 2, 3), (4, 1, 3), (1, 2, 3)),
        ((4, 2, 3), (4, 2, 3), (4, 1, 1)),
        ((4, 2, 3), (4, 2, 3), (1, 2, 1)),
    ],
)
def test_batches(a, b, out):
    """Elements of the operands lie where the strides say, and every one that is summed over is met once."""
    axes, summed = merge_batch(a, b, tuple(size == 1 for size in out))
    whole = np.broadcast_shapes(a, b)
    numbers = [np.broadcast_to(np.arange(np.prod(own)).reshape(own), whole) for own in (a, b)]
    assert extent(axes) == np.prod([w for w, o in zip(whole, out, strict=True) if o != 1])
    for flat, index in enumerate(np.ndindex(*out)):
        window = tuple(slice(None) if size == 1 else at for size, at in zip(out, index, strict=True))
        want = sorted(zip(*(each[window].ravel().tolist() for each in numbers), strict=True))
        here = operand_indices(axes, flat)
        got = sorted(
            tuple(int(one) + int(more) for one, more in zip(here, operand_indices(summed, s), strict=True))
            for s in range(extent(summed))
        )
        assert got == want


def test_terms_are_summed_from_the_smallest_to_the_largest():
    for terms, pairs in (
        (Terms(), 1),
        (Terms(2, 2, 1), 3),
        (Terms(3, 3, 2), 6),
        (Terms(3, 3, 4), 9),
        (Terms(1, 3, 2), 3),
    ):
        found = [tuple(map(int, terms.indices(jnp.int32(pair)))) for pair in range(terms.pairs)]
        assert len(set(found)) == len(found) == pairs
        assert [sum(pair) for pair in found] == sorted((sum(pair) for pair in found), reverse=True)
        assert found[-1] == (0, 0)


def test_three_terms_are_a_float32():
    x = np.float32([1.2345678, -3e-20, 3.4028235e38, -3.4e38, 0.0, np.inf, -np.inf, np.nan])
    parts = np.asarray(split(jnp.asarray(x), 3), np.float64)
    np.testing.assert_array_equal(parts.sum(0), x.astype(np.float64))
    assert (parts[1:, 5:] == 0).all()


@pytest.mark.parametrize(
    ("given", "want"),
    [((1, 8), (1, 8)), ((7, 9), (7, 16)), ((9, 64), (16, 64)), ((200, 65), (200, 128)), ((1001, 4096), (1008, 4096))],
)
def test_what_tma_can_tile(given, want):
    assert tiled_shape(*given, 2) == want


def test_configs_that_do_not_fit_are_refused():
    with pytest.raises(ValidationError, match="bytes of shared memory; a block has 231424 beside"):
        MatmulConfig(num_stages=5)
    with pytest.raises(ValidationError, match="256 registers of a thread"):
        MatmulConfig(tile_m=256, tile_n=256, num_stages=2)
    assert MatmulConfig().smem_bytes == 229376


@pytest.mark.parametrize(
    ("shape", "want"),
    [((4096, 4096), (128, 256)), ((1, 4096), (128, 64)), ((1024, 1024), (128, 64)), ((8192, 8192), (128, 256))],
)
def test_tiles_suit_the_shape(shape, want):
    request = OP.request((spec(shape[0], 512), spec(512, shape[1])), {})
    found = IMPLEMENTATIONS["matmul"].config_for(request, H200)
    assert (found.tile_m, found.tile_n) == want
    assert found.num_ctas == 132


def test_a_preset_and_its_name_are_one(gpu):
    x = spec(4, 4, dtype=np.float32)
    by_name, by_value = (
        gpu("matmul").op.request((x, x), {"precision": precision})
        for precision in ("BF16_BF16_F32_X6", lax.DotAlgorithmPreset.BF16_BF16_F32_X6)
    )
    assert by_name == by_value

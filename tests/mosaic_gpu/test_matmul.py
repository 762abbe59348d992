"""The matrix product in the simulator, against the float64 oracle: the table's cases, and many tiles of odd sizes.

Races are looked for, memory that nobody wrote is NaN, and 32 TMA copies may be under way.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core import compat, devices
from opmux.core.cases import matmul as matmul_cases
from opmux.core.op import backward_request
from opmux.core.ops.matmul import OP
from opmux.core.simulation import SimulatorOptions
from opmux.plugins import mosaic_gpu
from opmux.testing.tolerances import GRADIENT_FACTOR, assert_close, rtol

BF16 = jnp.bfloat16
VJP = next(found for found in mosaic_gpu.opmux_implementations() if found.op == "matmul_vjp")
CPU = devices.device("cpu")
QUICK = {
    "odd", "batches_broadcast_mixed", "no_terms", "no_batch", "not_finite", "int8_to_float32", "bool", "float16",
}  # fmt: skip
CASES = [
    pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.slow)
    for case in matmul_cases.cases()
]


@pytest.mark.parametrize("case", CASES)
def test_cases(gpu, case):
    args, kwargs = case.arguments()
    runner = gpu("matmul")
    if reasons := runner.refusals(*args, **kwargs):
        assert case.name not in QUICK
        assert all(reason.code and reason.detail and reason.hint for reason in reasons)
        pytest.xfail(reasons[0].detail)
    runner.check(*args, tolerance=case.rtol, **kwargs)


def test_quick_cases_exist():
    assert {case.name for case in matmul_cases.cases()} >= QUICK


def normal(*shape, dtype=np.float32):
    rng = np.random.default_rng(sum(shape))
    if dtype == np.int8:
        return rng.integers(-128, 128, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


SMALL = {"tile_n": 64, "num_stages": 2, "num_ctas": 2, "band": 2}
"""Two blocks of several tiles each; the third row of tiles is a band of its own."""


@pytest.mark.parametrize(
    ("a", "b", "dtype", "kwargs", "config"),
    [
        ((300, 200), (200, 136), BF16, {}, {}),
        ((260, 200), (200, 72), np.float32, {"precision": "highest"}, {"num_ctas": 1}),
        ((2, 3, 40, 72), (3, 72, 130), np.float16, {}, {"num_ctas": 1}),
        pytest.param((300, 200), (200, 136), np.float32, {}, {}, marks=pytest.mark.slow),
        pytest.param((300, 200), (200, 136), np.int8, {"preferred_element_type": "int32"}, {}, marks=pytest.mark.slow),
        pytest.param((300, 200), (200, 136), jnp.float8_e4m3fn, {}, {}, marks=pytest.mark.slow),
        pytest.param((300, 200), (200, 136), jnp.float8_e5m2, {"precision": "highest"}, {}, marks=pytest.mark.slow),
        pytest.param((300, 200), (200, 136), np.float32, {"precision": "BF16_BF16_F32_X3"}, {}, marks=pytest.mark.slow),
        pytest.param((257, 333), (333, 129), BF16, {}, {"tile_n": 128}, marks=pytest.mark.slow),
        pytest.param((520, 333), (333, 200), BF16, {}, {"tile_m": 256, "tile_n": 128}, marks=pytest.mark.slow),
        pytest.param((140, 300), (300, 530), BF16, {}, {"tile_n": 256, "num_stages": 4}, marks=pytest.mark.slow),
        pytest.param((140, 600), (600, 200), BF16, {}, {"tile_n": 192, "tile_k": 128}, marks=pytest.mark.slow),
        pytest.param((140, 600), (600, 200), BF16, {}, {"num_stages": 3, "band": 1}, marks=pytest.mark.slow),
        pytest.param((4, 140, 72), (72, 130), BF16, {}, {}, marks=pytest.mark.slow),
        pytest.param((140, 72), (4, 72, 130), BF16, {}, {}, marks=pytest.mark.slow),
    ],
)
def test_many_tiles(gpu, a, b, dtype, kwargs, config):
    tolerance = {"BF16_BF16_F32_X3": 3e-5}.get(kwargs.get("precision"))
    gpu("matmul").check(
        normal(*a, dtype=dtype), normal(*b, dtype=dtype), config={**SMALL, **config}, tolerance=tolerance, **kwargs
    )


def check_gradients(a, b, config=None, **kwargs):
    """Asserts that the simulated cotangents are those of a float64 product."""
    from opmux.plugins.mosaic_gpu.simulator import simulate

    call = OP.call((a, b), kwargs)
    request = backward_request(OP, call.request)
    assert VJP.supports(request, CPU) == []
    d_out = normal(*request["d_out"].shape, dtype=request["d_out"].dtype)
    given = VJP.config.model_validate({**VJP.config_for(request, CPU).model_dump(), **(config or {})})
    operands = {**call.operands, "d_out": jnp.asarray(d_out)}
    got = simulate(VJP.load(), request, operands, given, SimulatorOptions())

    left, right, wide = (np.asarray(array, np.float64) for array in (operands["a"], operands["b"], d_out))
    for name, whole in (("a", wide @ right.swapaxes(-1, -2)), ("b", left.swapaxes(-1, -2) @ wide)):
        own = operands[name].shape
        over = tuple(axis for axis in range(len(own) - 2) if own[axis] != whole.shape[axis])
        want = whole.sum(over, keepdims=True)
        assert got[name].dtype == operands[name].dtype
        tolerance = rtol(operands[name].dtype, wide.size // want.shape[-1])
        assert_close(got[name], want, GRADIENT_FACTOR * tolerance, f"d_{name}")


@pytest.mark.parametrize(
    ("a", "b", "dtype", "kwargs"),
    [
        ((200, 136), (136, 70), BF16, {}),
        ((3, 17, 72), (72, 40), np.float32, {"precision": "highest"}),
        ((2, 1, 5, 9), (1, 3, 9, 7), np.float16, {}),
        pytest.param((200, 136), (136, 70), np.float32, {}, marks=pytest.mark.slow),
        pytest.param((200, 136), (136, 70), np.float16, {"preferred_element_type": "float32"}, marks=pytest.mark.slow),
        pytest.param((9, 72), (4, 72, 40), BF16, {}, marks=pytest.mark.slow),
        pytest.param((4, 1, 3, 2, 9), (4, 2, 1, 9, 3), np.float32, {}, marks=pytest.mark.slow),
        pytest.param((2, 3, 4, 130, 9), (3, 1, 9, 70), BF16, {}, marks=pytest.mark.slow),
        pytest.param((70, 40), (40, 70), jnp.float8_e4m3fn, {}, marks=pytest.mark.slow),
    ],
)
def test_gradients(a, b, dtype, kwargs):
    check_gradients(normal(*a, dtype=dtype), normal(*b, dtype=dtype), {**SMALL, "num_ctas": 1}, **kwargs)


@pytest.mark.skipif(not compat.gpu_simulator_clips_tma(), reason="the simulator of this JAX has no cluster barriers")
@pytest.mark.parametrize("cluster", ["m", pytest.param("n", marks=pytest.mark.slow)])
def test_clusters(gpu, cluster):
    a, b = normal(300, 200, dtype=BF16), normal(200, 136, dtype=BF16)
    gpu("matmul").check(a, b, config={**SMALL, "cluster": cluster, "num_ctas": 4})


def test_values_are_the_same_with_64_bits_enabled(gpu):
    a, b = normal(5, 33, dtype=BF16), normal(33, 7, dtype=BF16)
    with jax.enable_x64(True):
        gpu("matmul").check(a, b, config={"num_ctas": 1})


@pytest.mark.parametrize("wide", [False, True])
def test_kernels_have_names_and_32_bit_indices(gpu, wide):
    runner = gpu("matmul")
    x = np.zeros((3, 512, 512), np.float16)
    with jax.enable_x64(wide):
        call = runner.op.call((x, x), {})
        text = str(jax.make_jaxpr(lambda operands: runner.kernel(call.request, operands, SMALL))(call.operands))
    assert "name=matmul" in text
    assert "i64[" not in text
    assert "f64[" not in text


@pytest.mark.parametrize(
    ("a", "b", "pads"),
    [((512, 512), (512, 512), False), ((7, 64), (64, 8), False), ((512, 200), (200, 512), True)],
)
def test_nothing_is_copied_that_tma_can_address(gpu, a, b, pads):
    runner = gpu("matmul")
    call = runner.op.call((np.zeros(a, np.float16), np.zeros(b, np.float16)), {})
    text = str(jax.make_jaxpr(lambda operands: runner.kernel(call.request, operands, {}))(call.operands))
    assert (" pad[" in text) == pads
    assert "transpose[" not in text

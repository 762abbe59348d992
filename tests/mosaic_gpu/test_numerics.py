"""Simulated results against the float64 oracle: the op tables' cases, which are small, and tiles of odd sizes.

Races are looked for, memory that nobody wrote is NaN, and 32 TMA copies may be under way.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core.cases import add as add_cases
from opmux.core.cases import reduce as reduce_cases

# One of each kind; the rest takes minutes.
QUICK = {
    "add": {"odd", "row_and_column", "empty", "bfloat16", "int32_wraps", "python_float", "not_finite"},
    "reduce": {
        "mean_of_all", "apart_axes", "first_axis", "sum_over_nothing", "max_beside_nothing", "float16_max",
        "int32_sum", "min_of_nan", "prod_with_zeros", "float32_max_in_int32",
    },
}  # fmt: skip
CASES = [
    pytest.param(op, case, id=f"{op}-{case.name}", marks=() if case.name in QUICK[op] else pytest.mark.slow)
    for op, module in (("add", add_cases), ("reduce", reduce_cases))
    for case in module.cases()
]
KINDS = ("sum", "mean", "max", "min", "prod")


@pytest.mark.parametrize(("op", "case"), CASES)
def test_cases(gpu, op, case):
    args, kwargs = case.arguments()
    runner = gpu(op)
    if reasons := runner.refusals(*args, **kwargs):
        assert case.name not in QUICK[op]
        assert all(reason.code and reason.detail and reason.hint for reason in reasons)
        pytest.skip(reasons[0].detail)
    runner.check(*args, tolerance=case.rtol, **kwargs)


def test_quick_cases_exist():
    assert {name for names in QUICK.values() for name in names} <= {param.values[1].name for param in CASES}


def normal(*shape, dtype=np.float32):
    rng = np.random.default_rng(sum(shape))
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-100, 100, shape).astype(dtype)
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def with_nan(array):
    array.flat[array.size // 2] = np.nan
    return array


TILES = {"tma_bytes": 0, "tile_n": 128, "num_stages": 2, "num_ctas": 2}
"""Two blocks of several tiles each, more tiles than stages."""


@pytest.mark.parametrize(
    ("x", "y", "dtype"),
    [
        ((50, 200), (50, 1), np.float32),
        pytest.param((50, 200), (1, 200), jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param((128 * 50,), (128 * 50,), np.float32, marks=pytest.mark.slow),
        pytest.param((128 * 50,), (1,), np.int32, marks=pytest.mark.slow),
        pytest.param((50, 1), (1, 200), np.float16, marks=pytest.mark.slow),
        pytest.param((3, 1, 17, 128), (1, 2, 17, 1), np.float32, marks=pytest.mark.slow),
    ],
)
def test_tiles_of_an_addition(gpu, x, y, dtype):
    gpu("add").check(normal(*x, dtype=dtype), normal(*y, dtype=dtype), config=TILES)


@pytest.mark.parametrize("size", [1024 * 3 + 700, 1024 * 3, 130, 128, 5])
def test_blocks_and_their_remainder(gpu, size):
    gpu("add").check(normal(size), normal(size), config={"block_size": 1024})


@pytest.mark.parametrize(
    ("shape", "axis", "kind", "dtype", "config"),
    [
        ((264, 32 * 5), 1, "sum", np.float32, {}),
        ((1, 75, 300), 1, "max", np.float32, {"tile_r": 4}),
        pytest.param((8 * 33, 64 * 3), 1, "max", jnp.bfloat16, {}, marks=pytest.mark.slow),
        pytest.param((5, 1000), 1, "min", np.float32, {}, marks=pytest.mark.slow),
        pytest.param((300, 37), 1, "mean", np.float16, {}, marks=pytest.mark.slow),
        pytest.param((2, 75, 260), 1, "mean", jnp.bfloat16, {"tile_r": 4}, marks=pytest.mark.slow),
        pytest.param((41, 300), 0, "sum", np.int32, {"tile_r": 4}, marks=pytest.mark.slow),
        pytest.param((41, 300), 0, "prod", np.int32, {"tile_r": 4}, marks=pytest.mark.slow),
        pytest.param((8, 1024), 1, "prod", np.int32, {"tile_r": 4}, marks=pytest.mark.slow),
        pytest.param((1031, 3), 0, "min", np.float32, {"tile_r": 4}, marks=pytest.mark.slow),
        pytest.param((2, 9, 5, 300), (1, 3), "sum", np.float32, {"tile_r": 4}, marks=pytest.mark.slow),
    ],
)
def test_tiles_of_a_reduction(gpu, shape, axis, kind, dtype, config):
    x = normal(*shape, dtype=dtype)
    if kind in ("max", "min"):
        x = with_nan(x)
    gpu("reduce").check(x, axis=axis, kind=kind, config={**TILES, **config})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 64, 65, 5000])
def test_folds_of_small_reductions(gpu, kind, length):
    gpu("reduce").check(1 + normal(length) / 1000, kind=kind, tolerance=1e-4)


def test_values_are_the_same_with_64_bits_enabled(gpu):
    x = normal(7, 33)
    with jax.enable_x64(True):
        gpu("add").check(x, x[:, :1])
        gpu("reduce").check(x, axis=1, kind="mean")


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("op", "kwargs"), [("add", {}), ("reduce", {"axis": 1}), ("reduce", {"axis": 0})])
def test_kernels_of_large_arrays_have_names_and_32_bit_indices(gpu, op, kwargs, wide):
    runner = gpu(op)
    x = np.zeros((512, 512), np.float32)
    with jax.enable_x64(wide):
        call = runner.op.call((x, x) if op == "add" else (x,), kwargs)
        text = str(jax.make_jaxpr(lambda operands: runner.kernel(call.request, operands, TILES))(call.operands))
    assert {"add": "add_tiles", "reduce": f"reduce_{'rows' if kwargs.get('axis') else 'columns'}_sum"}[op] in text
    assert "i64[" not in text
    assert "f64[" not in text

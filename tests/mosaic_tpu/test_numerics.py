"""Simulated results against the float64 oracle: every case of the op tables, and blocks that do not fit evenly."""

import importlib
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core.cases import add as add_cases
from opmux.core.cases import reduce as reduce_cases
from opmux.core.simulation import SimulatorOptions
from opmux.plugins.mosaic_tpu.dense_config import AddConfig, ReduceConfig
from opmux.testing.tolerances import assert_close, rtol

# In every mode memory that nobody wrote is NaN and races are looked for.
MODES = {
    "on_wait": SimulatorOptions(dma="on_wait"),
    "eager": SimulatorOptions(dma="eager"),
    "two_cores_seed_1": SimulatorOptions(cores=2, seed=1),
    "two_cores_seed_2": SimulatorOptions(cores=2, seed=2),
}
SLOW = ("rank_8", "float32_long_sum", "bfloat16_does_not_saturate", "alternating")
CASES = [
    pytest.param(op, case, id=f"{op}-{case.name}", marks=[pytest.mark.slow] * (case.name in SLOW))
    for op, cases in (("add", add_cases.cases()), ("reduce", reduce_cases.cases()))
    for case in cases
]
KINDS = ("sum", "mean", "max", "min", "prod")


def check(run, op, args, kwargs=None, config=None, options=None, rtol_=None):
    kwargs = kwargs or {}
    got = run(op)(*args, **kwargs, config=config, options=options)
    want = np.asarray(getattr(importlib.import_module(f"opmux.testing.oracle.{op}"), op)(*args, **kwargs))
    declared = jax.eval_shape(lambda: reference(run(op).op, args, kwargs))
    assert (got.shape, got.dtype) == (declared.shape, declared.dtype)
    longest = max((size for array in args for size in np.shape(array)), default=1)
    assert_close(got, want, rtol_ or rtol(got.dtype, longest), op)


def reference(op, args, kwargs):
    call = op.call(args, kwargs)
    return call.finish(op.reference(call.request, call.operands))


@pytest.mark.parametrize(("op", "case"), CASES)
def test_cases(run, refused, op, case):
    args, kwargs = case.arguments()
    try:
        check(run, op, args, kwargs, rtol_=case.rtol)
    except refused as refusal:
        (reasons,) = refusal.args
        assert all(reason.code and reason.detail and reason.hint for reason in reasons)
        pytest.skip(str(reasons[0].detail))


def normal(*shape, dtype=np.float32):
    rng = np.random.default_rng(0)
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-100, 100, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


SMALL_ADD = AddConfig(block_lanes=128, block_rows=8, block_leading=2)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((19, 300), (19, 300)),
        pytest.param((19, 1), (1, 300), marks=pytest.mark.slow),
        ((5, 17, 257), (5, 1, 257)),
        pytest.param((5, 1, 257), (1, 17, 1), marks=pytest.mark.slow),
        pytest.param((2, 3, 5, 9, 130), (1, 3, 1, 9, 1), marks=pytest.mark.slow),
        pytest.param((300,), (1,), marks=pytest.mark.slow),
    ],
)
def test_add_of_three_uneven_blocks_an_axis(run, mode, x, y):
    check(run, "add", (normal(*x), normal(*y)), config=SMALL_ADD, options=MODES[mode])


# [A, R, B] by kernel: lanes with results along lanes and along sublanes, a vector, rows, rows of one A, few rows.
SHAPES = {
    "lanes": ((300, 270), 1),
    "few_lanes": ((11, 270), 1),
    "vector": ((128 * 300,), 0),
    "rows": ((5, 270, 260), 1),
    "rows_of_one": ((270, 260), 0),
    "short": ((19, 3, 260), 1),
}
SMALL_REDUCE = ReduceConfig(block_size=2 * 128 * 128, block_r=128, block_b=128, strip_lanes=128)


@pytest.mark.parametrize(
    ("shape", "mode"),
    [
        pytest.param(shape, mode, marks=[pytest.mark.slow] * (mode in ("eager", "two_cores_seed_2") and slow))
        for shape, slow in zip(SHAPES, (False, True, True, False, True, True), strict=True)
        for mode in MODES
    ],
)
def test_reduce_of_three_uneven_blocks_an_axis(run, shape, mode):
    shape, axis = SHAPES[shape]
    check(run, "reduce", (normal(*shape),), {"axis": axis}, config=SMALL_REDUCE, options=MODES[mode])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.dtype(jnp.bfloat16), np.int32, np.int8], ids=str)
@pytest.mark.parametrize(("shape", "kind"), [*itertools.product(SHAPES, KINDS)])
def test_reduce_kinds_and_dtypes(run, shape, kind, dtype):
    shape, axis = SHAPES[shape]
    x = normal(*shape, dtype=dtype)
    if kind == "prod" and x.dtype.kind != "i":
        x = np.asarray(2.0 ** np.sign(x), x.dtype)
    check(run, "reduce", (x,), {"axis": axis, "kind": kind}, config=SMALL_REDUCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["lanes", "rows"])
def test_nan_propagates_from_any_block(run, shape, kind):
    shape, axis = SHAPES[shape]
    x = np.ones(shape, np.float32)
    x[(2, 140, 3)[: len(shape)]] = np.nan
    x[(3, 269, 5)[: len(shape)]] = np.nan
    check(run, "reduce", (x,), {"axis": axis, "kind": kind}, config=SMALL_REDUCE)


def test_int32_is_exact(run):
    x = np.full((300, 270), 2**24 + 1, np.int32)
    check(run, "reduce", (x,), {"axis": 1}, config=SMALL_REDUCE)
    check(run, "add", (x, x))


def test_bfloat16_accumulates_in_float32(run):
    check(run, "reduce", (np.ones((8, 1100), jnp.bfloat16),), {"axis": 1}, config=SMALL_REDUCE)
    check(run, "reduce", (np.ones((1100, 8), jnp.bfloat16),), {"axis": 0}, config=SMALL_REDUCE)


def test_same_values_with_64_bits_enabled(run):
    with jax.enable_x64(True):
        check(run, "add", (normal(19, 300), normal(19, 300)), config=SMALL_ADD)
        for shape, axis in (SHAPES["lanes"], SHAPES["rows"], SHAPES["short"]):
            check(run, "reduce", (normal(*shape),), {"axis": axis}, config=SMALL_REDUCE)

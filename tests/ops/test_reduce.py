"""`reduce`: dtypes of `jnp`, the canonical layout, empty axes, refusals, gradients, and blocks of the kernel."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opmux import registry
from opmux.core.cases.reduce import KINDS, cases
from opmux.core.errors import ArgumentError, ArgumentTypeError
from opmux.core.ops.reduce import OP
from opmux.core.request import ArraySpec
from opmux.plugins.interpret.dense_config import ReduceConfig
from opmux.testing import Subject, assert_close, check_numerics
from opmux.testing.oracle.reduce import reduce as oracle
from opmux.testing.subject import run_reference

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "uint32", "float8_e4m3fn", "float16", "bfloat16", "float32"]
DTYPES += ["complex64"]
WIDE = ["int64", "uint64", "float64", "complex128"]
REQUESTED = [None, "bool", "int8", "uint8", "int32", "float16", "float32", int, float, jnp.bfloat16, "complex64"]


def call(x, **options):
    return run_reference(OP, (x,), options)


def spec_of(function, *args):
    out = jax.eval_shape(function, *args)
    return out.shape, out.dtype, out.weak_type


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_are_those_of_jnp(x64, kind):
    with jax.enable_x64(x64):
        arrays = [jnp.ones((2, 3), dtype) for dtype in DTYPES + WIDE * x64]
        for x in [*arrays, jnp.full((2, 3), 1), jnp.full((2, 3), 1.0), True, 2, 0.5]:
            for dtype in REQUESTED + WIDE * x64:
                if dtype is not None and (kind in ("max", "min") or (kind == "mean" and dtype == "bool")):
                    continue
                options = {} if dtype is None else {"dtype": dtype}
                want = spec_of(lambda x, options=options: getattr(jnp, kind)(x, **options), x)
                got = spec_of(lambda x, options=options: call(x, kind=kind, **options), x)
                assert got == want, (x, dtype)


def test_short_integers_widen_where_jnp_has_no_rule():
    assert call(jnp.ones((100,), jnp.int4)) == 100
    assert call(jnp.ones((100,), jnp.uint4)).dtype == jnp.uint32


def test_the_dtype_of_an_extremum_is_converted_afterwards():
    x = jnp.asarray([1.5, 2.75, -3.0])
    assert call(x, kind="max", dtype="int32") == 2
    assert call(jnp.asarray([100000, 1]), kind="max", dtype="float16") == np.inf


@pytest.mark.parametrize(
    ("shape", "axis", "canonical"),
    [
        ((2, 3, 5), 1, (2, 3, 5)),
        ((2, 3, 5), 0, (1, 2, 15)),
        ((2, 3, 5), -1, (6, 5, 1)),
        ((2, 3, 5), None, (1, 30, 1)),
        ((2, 3, 5), (), (30, 1, 1)),
        ((2, 3, 5), (2, 1), (2, 15, 1)),
        ((2, 3, 5), (0, -1), (1, 2, 3, 5, 1)),
        ((2, 3, 1, 5, 4, 7), (1, 4), (2, 3, 5, 4, 7)),
        ((2, 1, 5), (0, 2), (1, 10, 1)),
        ((1, 3, 1, 5), (0, 2, 3), (3, 5, 1)),
        ((0, 3), 1, (0, 3, 1)),
        ((0, 3), [np.int64(0)], (1, 0, 3)),
        ((), None, (1, 1, 1)),
        ((1, 1), 0, (1, 1, 1)),
        ((0, 2, 0), (0, 2), (1, 0, 2, 0, 1)),
    ],
)
def test_canonical_layout(shape, axis, canonical):
    x = jnp.ones(shape)
    jaxpr = str(jax.make_jaxpr(lambda x: OP.call((x,), {"axis": axis}).operands["x"])(x))
    request = OP.request((x,), {"axis": axis})
    assert request["x"].shape == canonical
    assert OP.outputs(request)["out"] == ArraySpec(canonical[::2], np.dtype("float32"))
    assert OP.cost(request).flops == x.size
    assert "transpose" not in jaxpr, "a reduction never copies its operand"


def test_empty_axes():
    empty = jnp.zeros((3, 0, 2))
    assert (call(empty, axis=1) == 0).all()
    assert (call(empty, axis=1, kind="prod") == 1).all()
    assert np.isnan(call(empty, axis=1, kind="mean")).all()
    assert call(empty, axis=0, kind="max").shape == (0, 2)
    for kind in ("max", "min"):
        with pytest.raises(ValueError, match=r"'x'.*empty along axis 1"):
            call(empty, axis=(0, 1), kind=kind)
        with pytest.raises(ValueError, match="axis 1"):
            call(jnp.zeros((0, 0)), axis=1, kind=kind)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kind": "summ"}, ArgumentError, "'kind'.*'summ'.*'sum'"),
        ({"kind": None}, ArgumentTypeError, "'kind'.*None"),
        ({"axis": 2}, ArgumentError, "'axis': got 2; allowed: -2 to 1"),
        ({"axis": -3}, ArgumentError, "got -3"),
        ({"axis": (0, 0)}, ArgumentError, r"\(0, 0\).*once"),
        ({"axis": (0, -2)}, ArgumentError, r"\(0, -2\).*once"),
        ({"axis": 1.0}, ArgumentTypeError, "'axis'.*1.0"),
        ({"axis": (0, "b")}, ArgumentTypeError, "'axis'"),
        ({"axis": "batch"}, ArgumentTypeError, "'axis'"),
        ({"axis": True}, ArgumentTypeError, "'axis'.*True"),
        ({"keepdims": 1}, ArgumentTypeError, "'keepdims'.*int"),
        ({"dtype": "flaot32"}, ArgumentTypeError, "'dtype'.*flaot32"),
        ({"dtype": "U8"}, ArgumentTypeError, "'dtype'"),
        ({"kind": "mean", "dtype": bool}, ArgumentTypeError, "'dtype'.*bool"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        OP.call((np.ones((2, 3)),), options)


@pytest.mark.parametrize("x", [[1.0], None, "x", np.array(["x"]), np.array([None]), jax.random.key(0)])
def test_bad_arrays(x):
    with pytest.raises(ArgumentTypeError, match="'x'"):
        OP.call((x,), {})


def test_a_traced_axis_is_refused():
    with pytest.raises(ArgumentTypeError, match="'axis'"):
        jax.jit(lambda axis: call(jnp.ones((2, 3)), axis=axis))(1)


def test_axis_of_a_scalar():
    with pytest.raises(ArgumentError, match=r"'axis'.*got 0"):
        call(1.0, axis=0)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_gradients_of_ties_and_zeros(backend):
    run = registry.get("reduce", backend=backend)
    x = jnp.asarray([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, -1.0]])
    ties = jax.grad(lambda x: run(x, kind="max", axis=1).sum())(x)
    np.testing.assert_allclose(ties, [[0, 0.5, 0.5, 0], [1 / 3, 1 / 3, 1 / 3, 0]], rtol=1e-6)
    y = jnp.asarray([[2.0, 0.0, 3.0], [0.0, 0.0, 3.0], [2.0, 5.0, 3.0]])
    zeros = jax.grad(lambda y: run(y, kind="prod", axis=1).sum())(y)
    np.testing.assert_allclose(zeros, [[0, 6, 0], [0, 0, 0], [15, 6, 10]], rtol=1e-6)


def test_the_oracle_by_hand():
    assert oracle(np.full((300,), 100, np.int8)) == 30000
    assert oracle(np.full((3,), 100, np.int8), dtype="int8") == 44
    assert oracle(np.int16([-7, 2]), kind="mean", dtype="int32") == -2
    assert oracle(np.float32([0.5, 0]), dtype="bool")
    assert oracle(np.full((70,), 3, np.int32), kind="prod") == int(pow(3, 70, 2**32)) - 2**32 * (
        pow(3, 70, 2**32) >> 31
    )
    np.testing.assert_array_equal(oracle(np.ones((2, 3, 4)), axis=(0, -1), keepdims=True), np.full((1, 3, 1), 8.0))


# The interpreted kernel in small blocks: several on every axis, and tails.

SMALL = ReduceConfig(block_kept=6, block_reduced=7)


@pytest.fixture(scope="module")
def blocked():
    subject = Subject.of("reduce", "interpret")
    return dataclasses.replace(subject, run=registry.get("reduce", backend="interpret", config=SMALL))


def small(case):
    return "complex" not in case.name and case.arguments()[0][0].size < 700


@pytest.mark.parametrize("case", [case for case in cases() if small(case)], ids=lambda case: case.name)
def test_small_blocks(blocked, case):
    check_numerics(blocked, case)


def test_64_bit_sums_in_blocks():
    x = np.random.default_rng(0).standard_normal((5, 33, 4))
    with jax.enable_x64(True):
        run = registry.get("reduce", backend="interpret", config=SMALL)
        assert_close(run(x, axis=(0, 2)), x.sum((0, 2)), 1e-12, "float64")
        whole = np.full((3, 33), 2**40)
        np.testing.assert_array_equal(run(whole, axis=1), np.full(3, 33 * 2**40))
        np.testing.assert_array_equal(run(-whole, axis=1, kind="max"), np.full(3, -(2**40)))
        assert run(np.ones((3, 33), np.int8)).dtype == np.int64


@settings(max_examples=25, deadline=None)
@given(
    shape=st.lists(st.integers(1, 7), min_size=1, max_size=5),
    reduced=st.lists(st.booleans(), min_size=5, max_size=5),
    blocks=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(["float32", "int8", "bool"]),
)
def test_any_shape_and_block(shape, reduced, blocks, kind, dtype):
    rng = np.random.default_rng(0)
    if dtype == "float32":  # near 1: a product of many must not reach the numbers that CPUs flush to 0
        x = (rng.uniform(0.5, 2, shape) * rng.choice([-1, 1], shape)).astype(dtype)
    else:
        x = rng.integers(-3, 4, shape).astype(dtype)
    axis = tuple(number for number in range(len(shape)) if reduced[number])
    config = ReduceConfig(block_kept=blocks[0], block_reduced=blocks[1])
    got = registry.get("reduce", backend="interpret", config=config)(x, kind=kind, axis=axis)
    assert_close(got, oracle(x, kind=kind, axis=axis), 1e-5, f"{kind} {dtype} {shape} {axis} {blocks}")

"""`add`: JAX's promotion, the canonical layout, what the op refuses, and blocks of the interpreted kernel."""

from __future__ import annotations

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from opmux import registry
from opmux.core.cases.add import cases
from opmux.core.devices import Device
from opmux.core.errors import ArgumentError, ArgumentTypeError
from opmux.core.ops.add import OP
from opmux.core.request import ArraySpec
from opmux.plugins.interpret.dense_config import AddConfig, supports, trailing_blocks
from opmux.testing import Subject, check_gradients, check_numerics
from opmux.testing.oracle.add import add as oracle
from opmux.testing.oracle.add import wrap
from opmux.testing.subject import run_reference

DTYPES = ["bool", "int4", "int8", "uint8", "int16", "int32", "uint32", "float8_e4m3fn", "float16", "bfloat16"]
DTYPES += ["float32", "complex64"]
WIDE = ["int64", "uint64", "float64", "complex128"]
SCALARS = [True, 2, 0.5, 1j, np.float32(1), np.int8(1), np.float64(1)]
CPU = Device("cpu", "cpu")


def spec_of(function, *args):
    out = jax.eval_shape(function, *args)
    return out.shape, out.dtype, out.weak_type


def call(x, y):
    return run_reference(OP, (x, y), {})


def values(dtypes):
    arrays = [jnp.ones((2, 1), dtype) for dtype in dtypes]
    return [*arrays, *SCALARS, jnp.asarray(2.0), jnp.full((3,), 1), jnp.full((3,), 1j)]


@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_and_weak_types_are_those_of_jnp(x64):
    with jax.enable_x64(x64):
        for x, y in itertools.product(values(DTYPES + WIDE * x64), repeat=2):
            try:
                want = spec_of(jnp.add, x, y)
            except ValueError:  # float8 does not promote
                with pytest.raises(ArgumentTypeError, match="astype"):
                    jax.eval_shape(call, x, y)
                continue
            assert spec_of(call, x, y) == want, (x, y)


def test_weak_types_of_concrete_scalars():
    assert call(1, 2.0).weak_type
    assert not call(1, np.float32(2)).weak_type


def test_strict_promotion_is_an_argument_error():
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ArgumentTypeError, match="'y'"):
        call(jnp.ones(3), jnp.ones(3, jnp.int32))


def test_operands_are_not_broadcast():
    request = OP.request((jnp.ones((5, 1, 3)), jnp.ones(3, jnp.bfloat16)), {})
    assert [spec.shape for _, spec in request.operands] == [(5, 1, 3), (1, 1, 3)]
    assert {spec.dtype.name for _, spec in request.operands} == {"float32"}
    assert OP.outputs(request)["out"] == ArraySpec((5, 1, 3), np.dtype("float32"))


def test_cost_is_one_addition_an_element():
    cost = OP.cost(OP.request((jnp.ones((5, 1)), jnp.ones((1, 7))), {}))
    assert (cost.flops, cost.bytes) == (35, 4 * (5 + 7 + 35))


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (np.ones((2, 3)), np.ones((2, 4)), ArgumentError, r"'y'.*\(2, 4\).*\(2, 3\)"),
        (np.ones(3), np.ones((4, 2)), ArgumentError, r"\(4, 2\)"),
        ([1.0], np.ones(3), ArgumentTypeError, "'x'.*list"),
        (np.ones(3), None, ArgumentTypeError, "'y'.*NoneType"),
        (np.ones(3), "two", ArgumentTypeError, "'y'.*str"),
        (np.array(["a"]), np.ones(1), ArgumentTypeError, "'x'.*dtype <U1"),
        (np.array([None]), np.ones(1), ArgumentTypeError, "'x'.*object"),
        (np.ones(1), np.array(["2020-01-01"], "datetime64[D]"), ArgumentTypeError, "'y'.*datetime64"),
        (jax.random.key(0), np.ones(1), ArgumentTypeError, "'x'.*key"),
    ],
)
def test_bad_input(x, y, error, message):
    with pytest.raises(error, match=message):
        OP.call((x, y), {})


def test_the_oracle_wraps():
    assert wrap([127 + 1, -129, 255], 8, True).tolist() == [-128, 127, -1]
    assert wrap([256, -1], 8, False).tolist() == [0, 255]
    assert oracle(np.int8([100]), 100).tolist() == [-56]
    assert oracle(np.uint8([200]), np.int8([100])).tolist() == [300]


# The interpreted kernel in small blocks: several on every axis, and tails.

SMALL = AddConfig(block_size=6)


@pytest.fixture(scope="module")
def blocked():
    subject = Subject.of("add", "interpret")
    return dataclasses.replace(subject, run=registry.get("add", backend="interpret", config=SMALL))


def small(case):
    return "complex" not in case.name and all(np.size(value) < 700 for value in case.arguments()[0])


@pytest.mark.parametrize("case", [case for case in cases() if small(case)], ids=lambda case: case.name)
def test_small_blocks(blocked, case):
    check_numerics(blocked, case)


@pytest.mark.parametrize("name", ["both_broadcast", "alternating", "empty_by_broadcast"])
def test_gradients_in_small_blocks(blocked, name):
    check_gradients(blocked, next(case for case in cases() if case.name == name))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("xyb")), max_size=5), st.integers(1, 30))
def test_any_shape_and_block(axes, block_size):
    rng = np.random.default_rng(0)
    x = rng.standard_normal([1 if who == "y" else size for size, who in axes]).astype(np.float32)
    y = rng.standard_normal([1 if who == "x" else size for size, who in axes]).astype(np.float32)
    run = registry.get("add", backend="interpret", config=AddConfig(block_size=block_size))
    np.testing.assert_array_equal(run(x, y), x + y)


@pytest.mark.parametrize(("op", "options"), [("add", {}), ("matmul", {}), ("reduce", {"axis": 0})])
def test_vmap_makes_no_loop_over_the_batch(op, options):
    run = registry.get(op, backend="interpret")
    arrays = [np.ones((5, 3, 3), np.float32)] * (1 if op == "reduce" else 2)
    text = str(jax.make_jaxpr(jax.vmap(lambda *arrays: run(*arrays, **options)))(*arrays))
    grids = re.findall(r"grid=\(([^)]*)\)", text)
    assert grids
    assert all(int(size) == 1 for grid in grids for size in grid.split(",") if size.strip())


def test_blocks_span_trailing_axes_first_and_are_even():
    assert trailing_blocks((5, 7, 9), 30) == (1, 3, 9)
    assert trailing_blocks((5, 7, 9), 1000) == (5, 7, 9)
    assert trailing_blocks((10,), 6) == (5,)
    assert trailing_blocks((4, 9), 4) == (1, 3)


def test_config_refuses_what_cannot_be():
    for wrong in ({"block_size": 0}, {"block": 1}, {"block_size": 1.5}):
        with pytest.raises(ValidationError):
            AddConfig(**wrong)


def test_interpret_rejects_complex_and_checked_shard_map():
    request = OP.request((jnp.ones(3, jnp.complex64), 1.0), {})
    assert [reason.code for reason in supports(request, CPU)] == ["dtype"]
    request = dataclasses.replace(OP.request((jnp.ones(3), 1.0), {}), manual_axes=True)
    assert [reason.code for reason in supports(request, CPU)] == ["shard_map"]
    assert supports(OP.request((jnp.ones(3), 1.0), {}), CPU) == []

"""`matmul`: dtypes of `jnp.matmul`, the canonical layout, precisions, refusals, and blocks of the kernel."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from opmux import registry
from opmux.core.cases.matmul import cases
from opmux.core.devices import Device
from opmux.core.errors import ArgumentError, ArgumentTypeError
from opmux.core.op import backward_request
from opmux.core.ops.matmul import OP
from opmux.core.request import ArraySpec
from opmux.plugins.interpret.dense_config import MatmulConfig, supports
from opmux.plugins.interpret.matmul import matmul_vjp
from opmux.testing import Subject, assert_close, check_gradients, check_numerics
from opmux.testing.oracle.matmul import matmul as oracle
from opmux.testing.subject import run_reference

DTYPES = ["bool", "int8", "uint8", "int16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64"]
WIDE = ["int64", "uint64", "float64", "complex128"]
F32 = np.float32


def call(*args, **kwargs):
    return run_reference(OP, args, kwargs)


def spec_of(function, *args, **kwargs):
    out = jax.eval_shape(lambda *args: function(*args, **kwargs), *args)
    return out.shape, out.dtype, out.weak_type


@pytest.mark.parametrize("x64", [False, True])
def test_dtypes_and_weak_types_are_those_of_jnp(x64):
    with jax.enable_x64(x64):
        operands = [jnp.ones((3,), dtype) for dtype in DTYPES + WIDE * x64]
        operands += [jnp.full((3,), 1), jnp.full((3,), 1.0), jnp.full((3,), 1j)]
        refused = 0
        for a, b in itertools.product(operands, repeat=2):
            try:
                want = spec_of(jnp.matmul, a, b)
            except TypeError:  # jnp forgets to promote int8 to a weak int32, and the like
                refused += 1
                want = spec_of(jnp.add, a[0], b[0])
            assert spec_of(call, a, b) == want, (a, b)
        assert refused < len(operands) ** 2 / 4


@pytest.mark.parametrize(
    ("given", "preferred"),
    [
        ("int8", "int32"), ("int8", "int16"), ("int8", "float32"), ("uint8", "int32"), ("bool", "int32"),
        ("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16"), ("float32", "complex64"),
        ("float16", jnp.float32), ("int32", np.dtype("int32")),
    ],
)  # fmt: skip
def test_preferred_element_type(given, preferred):
    a = jnp.ones((3, 5), given)
    want = spec_of(jnp.matmul, a, a.T, preferred_element_type=preferred)
    assert spec_of(call, a, a.T, preferred_element_type=preferred) == want
    assert call(a, a.T, preferred_element_type=preferred)[0, 0] == 5


def test_a_weak_operand_does_not_widen():
    assert spec_of(call, jnp.ones((2, 3), jnp.bfloat16), jnp.full((3, 2), 0.5)) == ((2, 2), jnp.bfloat16, False)


def test_batches_are_not_broadcast():
    request = OP.request((jnp.ones((2, 3, 5, 9)), jnp.ones((9, 7))), {})
    assert [spec.shape for _, spec in request.operands] == [(2, 3, 5, 9), (1, 1, 9, 7)]
    assert OP.outputs(request)["out"] == ArraySpec((2, 3, 5, 7), np.dtype("float32"))
    cost = OP.cost(request)
    assert (cost.flops, cost.bytes) == (2 * 2 * 3 * 5 * 7 * 9, 4 * (2 * 3 * 5 * 9 + 9 * 7 + 2 * 3 * 5 * 7))


def params(**kwargs):
    return OP.request((jnp.ones((2, 3)), jnp.ones((3, 2))), kwargs).params


def test_precisions():
    highest = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    for same in ("highest", "float32", lax.Precision.HIGHEST, highest, ("highest", "float32")):
        assert params(precision=same).precision == highest
    assert params(precision=("default", lax.Precision.HIGH)).precision == (lax.Precision.DEFAULT, lax.Precision.HIGH)
    preset = lax.DotAlgorithmPreset.BF16_BF16_F32
    assert params(precision=preset).precision is preset
    assert params(precision="BF16_BF16_F32").precision is preset
    assert params().precision is None
    assert hash(params(precision=["high", "high"])) == hash(params(precision="high"))


def test_precision_follows_the_context():
    with jax.default_matmul_precision("high"):
        assert params() == params(precision="high")
        assert params(precision="highest") != params()


@pytest.mark.parametrize(
    ("a", "b", "options", "error", "message"),
    [
        (np.ones((2, 3)), np.ones((4, 5)), {}, ArgumentError, r"'b'.*\(4, 5\).*\(2, 3\)"),
        (np.ones(3), np.ones(4), {}, ArgumentError, r"\(4,\).*\(3,\)"),
        (np.ones((2, 2, 3)), np.ones((3, 3, 4)), {}, ArgumentError, r"batch.*\(2, 2, 3\)"),
        (F32(2), np.ones(3), {}, ArgumentError, "'a'.*scalar"),
        (np.ones(3), 2.0, {}, ArgumentError, "'b'.*scalar"),
        ([[1.0]], np.ones((1, 1)), {}, ArgumentTypeError, "'a'.*list"),
        (np.ones((1, 1)), np.array([["x"]]), {}, ArgumentTypeError, "'b'.*dtype"),
        (np.ones((1, 1)), np.ones((1, 1)), {"precision": "hihgest"}, ArgumentError, "hihgest.*'highest'"),
        (np.ones((1, 1)), np.ones((1, 1)), {"precision": 3}, ArgumentTypeError, "'precision'.*3"),
        (np.ones((1, 1)), np.ones((1, 1)), {"precision": ("high",)}, ArgumentTypeError, "'precision'"),
        (np.ones((1, 1)), np.ones((1, 1)), {"precision": ("high", None)}, ArgumentTypeError, "'precision'"),
        (np.ones((1, 1)), np.ones((1, 1)), {"preferred_element_type": "flat32"}, ArgumentTypeError, "flat32"),
        (np.ones((1, 1)), np.ones((1, 1)), {"preferred_element_type": "int32"}, ArgumentTypeError, "int32.*float32"),
        (np.ones((1, 1), "i4"), np.ones((1, 1), "i4"), {"preferred_element_type": "int8"}, ArgumentTypeError, "int8"),
        (np.ones((1, 1), "c8"), np.ones((1, 1)), {"preferred_element_type": F32}, ArgumentTypeError, "complex64"),
    ],
)
def test_bad_input(a, b, options, error, message):
    with pytest.raises(error, match=message):
        OP.call((a, b), options)


def test_float64_without_x64_warns_as_jnp_does():
    with pytest.warns(UserWarning, match="float64"):
        request = OP.request((jnp.ones((1, 1)), jnp.ones((1, 1))), {"preferred_element_type": "float64"})
    assert request.params.dtype == np.float32


def test_the_oracle_by_hand():
    a = np.int8([[100, 100]])
    assert oracle(a, a.T).tolist() == [[20000 - 78 * 256]]
    assert oracle(a, a.T, preferred_element_type=np.dtype("int32")).tolist() == [[20000]]
    np.testing.assert_array_equal(oracle([1.0, 2.0], [[1.0], [3.0]]), [7.0])


# The interpreted kernel in small blocks: several on every axis, and tails.

SMALL = MatmulConfig(block_m=3, block_n=4, block_k=5, block_batch=2)


@pytest.fixture(scope="module")
def blocked():
    subject = Subject.of("matmul", "interpret")
    return dataclasses.replace(subject, run=registry.get("matmul", backend="interpret", config=SMALL))


def small(case):
    return "complex" not in case.name and all(array.size < 700 for array in case.arguments()[0])


@pytest.mark.parametrize("case", [case for case in cases() if small(case)], ids=lambda case: case.name)
def test_small_blocks(blocked, case):
    check_numerics(blocked, case)


@pytest.mark.parametrize("name", ["bfloat16", "weights", "batches_broadcast_both", "batches_broadcast_mixed"])
def test_gradients_in_small_blocks(blocked, name):
    check_gradients(blocked, next(case for case in cases() if case.name == name))


@pytest.mark.parametrize("preferred", [None, "float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward_kernel_of_requested_dtypes(dtype, preferred):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((2, 1, 7, 9), (3, 9, 11)))
    forward = OP.call((a, b), {"preferred_element_type": preferred})
    request = backward_request(OP, forward.request)
    d_out = jnp.asarray(rng.standard_normal((2, 3, 7, 11)), OP.outputs(forward.request)["out"].dtype)
    got = matmul_vjp(request, {**forward.operands, "d_out": d_out}, SMALL)
    wide_a, wide_b, wide_d = (np.asarray(array).astype(np.float64) for array in (a, b, d_out))
    d_a = np.einsum("xymn,ykn->xmk", wide_d, wide_b)[:, None]
    d_b = np.einsum("xmk,xymn->ykn", wide_a[:, 0], wide_d)[None]
    for name, want in (("a", d_a), ("b", d_b)):
        assert ArraySpec.of(got[name]) == request[name]
        assert_close(got[name], want, 5e-6 if dtype == "float32" else 2**-7, name)


def test_long_sums_in_blocks_lose_nothing_to_bfloat16():
    a = jnp.ones((2, 4099), jnp.bfloat16)
    out = registry.get("matmul", backend="interpret", config=MatmulConfig(block_k=1000))(a, a.T)
    assert out.dtype == jnp.bfloat16
    assert (out == 4096).all()


def test_64_bit_products_in_blocks():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((7, 33)), rng.standard_normal((33, 9))
    whole = rng.integers(-(2**30), 2**30, (7, 33))
    with jax.enable_x64(True):
        run = registry.get("matmul", backend="interpret", config=SMALL)
        assert_close(run(a, b), a @ b, 1e-12, "float64")
        np.testing.assert_array_equal(run(whole, whole.T), whole @ whole.T)


def test_interpret_rejects_complex_results():
    request = OP.request((jnp.ones((1, 1)), jnp.ones((1, 1))), {"preferred_element_type": "complex64"})
    assert [reason.code for reason in supports(request, Device("cpu", "cpu"))] == ["dtype"]

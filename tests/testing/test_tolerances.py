from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from opmux.testing import assert_close, rtol
from opmux.testing.tolerances import coarsest

F32, BF16, F16 = np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16)


def rows(dtype=F32):
    return np.random.default_rng(0).standard_normal((6, 8)).astype(dtype)


def test_tf32_is_not_float32():
    want = rows().astype(np.float64)
    assert_close((want * (1 + 4e-6)).astype(F32), want, rtol(F32), "x")
    with pytest.raises(AssertionError, match=r"to 5\.1e-06 of the scale"):
        assert_close((want * (1 + 2.0**-11)).astype(F32), want, rtol(F32), "x")


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_two_units_in_the_last_place_of_16_bits(dtype):
    want, eps = rows().astype(np.float64), float(jnp.finfo(dtype).eps)
    assert_close((want * (1 + eps)).astype(dtype), want, rtol(dtype), "x")
    with pytest.raises(AssertionError):
        assert_close((want * (1 + 4 * eps)).astype(dtype), want, rtol(dtype), "x")


def test_float64_does_not_pass_through_float32():
    want = rows().astype(np.float64) / 3
    with pytest.raises(AssertionError):
        assert_close(want.astype(F32).astype(np.float64), want, rtol(np.float64), "x")


def test_long_sums_may_err_more_in_their_accumulator():
    assert rtol(F32, 10_000) == pytest.approx(5e-6 + 100 * 2.0**-23)
    assert rtol(BF16, 10_000) == pytest.approx(2.0**-6 + 100 * 2.0**-23)
    assert rtol(np.float64, 10_000) < 2e-12
    assert rtol(np.int32) == 0


def test_an_error_is_measured_by_its_row_and_array():
    want = np.ones((2, 3))
    want[0, 0] = 1e-3
    got = want.astype(F32)
    got[0, 0] += 4e-6
    assert_close(got, want, rtol(F32), "x")
    large = want * np.array([[1.0], [1e4]])
    with pytest.raises(AssertionError, match=r"the worst is \[1, 1\]"):
        assert_close((large + [[0], [1]] * np.eye(2, 3, 0)[[1, 1]]).astype(F32), large, rtol(F32), "x")


def test_the_message_says_where_and_how_many():
    got = rows()
    got[2, 3] += 1
    got[4, 5] += 2
    with pytest.raises(AssertionError, match=r"out: 2 of 48 .* the worst is \[4, 5\]: got "):
        assert_close(got, rows().astype(np.float64), 1e-5, "out")


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (np.nan, 1.0), (1.0, np.nan), (np.inf, 1.0), (np.inf, -np.inf), (np.inf, np.nan), (np.nan, -np.inf),
        (0.0, -np.inf),
    ],
)  # fmt: skip
def test_what_is_not_finite_must_be_in_place(got, want):
    for shape in ((), (1,), (2, 2)):
        with pytest.raises(AssertionError, match="where not finite"):
            assert_close(np.full(shape, got, F32), np.full(shape, want), 1.0, "x")
        assert_close(np.full(shape, want, F32), np.full(shape, want), 0.0, "x")


def test_overflow_of_the_output_dtype_is_infinite():
    assert_close(np.array([np.inf, 1], F16), np.array([1e6, 1]), rtol(F16), "x")
    with pytest.raises(AssertionError):
        assert_close(np.array([65504, 1], F16), np.array([1e6, 1]), rtol(F16), "x")


def test_integers_and_booleans_are_exact():
    assert_close(np.array([2, 3], np.int8), np.array([2, 3]), 1.0, "x")
    with pytest.raises(AssertionError, match="exactly"):
        assert_close(np.array([2, 3], np.int8), np.array([2, 4]), 1.0, "x")
    with pytest.raises(AssertionError, match="exactly"):
        assert_close(np.array([True]), np.array([False]), 1.0, "x")
    big = np.array([2**62 + 1], np.int64)
    with pytest.raises(AssertionError):
        assert_close(big, big - 1, 0.0, "x")


def test_complex_numbers_have_the_tolerance_of_their_parts():
    want = np.array([1 + 1j, 2 - 1j])
    assert_close(want.astype(np.complex64), want, rtol(np.complex64), "x")
    with pytest.raises(AssertionError):
        assert_close((want + 1e-4j).astype(np.complex64), want, rtol(np.complex64), "x")


def test_rows_of_zeros_can_be_exact():
    want = rows().astype(np.float64)
    want[2] = 0
    got = want.astype(F32)
    got[2] = 1e-9
    assert_close(got, want, rtol(F32), "x")
    with pytest.raises(AssertionError):
        assert_close(got, want, rtol(F32), "x", exact_zeros=True)


def test_the_floor_is_a_scale():
    got, want = np.full(4, 1e-7, F32), np.zeros(4)
    with pytest.raises(AssertionError):
        assert_close(got, want, 1e-5, "x")
    assert_close(got, want, 1e-5, "x", floor=1.0)


def test_empty_arrays_only_have_shapes():
    assert_close(np.zeros((0, 3), F32), np.zeros((0, 3)), 0.0, "x")
    with pytest.raises(AssertionError, match="shape"):
        assert_close(np.zeros((0, 3), F32), np.zeros((0, 4)), 0.0, "x")


def test_coarsest_dtype():
    assert coarsest([rows(F32), rows(BF16), np.zeros(2, int)]) == BF16
    assert coarsest([np.zeros(2, int)]) == F32

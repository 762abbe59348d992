"""Calls after other calls: nothing that one leaves behind reaches the next."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from opmux import registry
from opmux.testing.oracle.attention import attention as oracle


@pytest.mark.parametrize("backend", ["interpret", "xla"])
def test_A21_a_tail_reads_nothing_that_an_earlier_call_left_behind(backend):
    rng = np.random.default_rng(0)
    shapes = ((1, 37, 2, 20), (1, 131, 2, 20), (1, 131, 2, 20))
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    attention = jax.jit(registry.get("attention", backend=backend))
    first = attention(*arrays)
    assert np.isnan(attention(*(np.full_like(array, np.nan) for array in arrays))).all()
    np.testing.assert_array_equal(attention(*arrays), first)
    np.testing.assert_allclose(first, oracle(*arrays), rtol=1e-5, atol=1e-6)

"""Gradients on the backends that run anywhere, against differences of the float64 oracle."""

from __future__ import annotations

import pytest

from opmux import registry
from opmux.testing import check_case_gradients, conformance_params, differentiable, expected_rejections


@pytest.mark.parametrize(
    ("subject", "case"), conformance_params(registry.ops(), ["interpret", "xla"], select=differentiable)
)
def test_gradients(subject, case):
    with expected_rejections():
        check_case_gradients(subject, case)

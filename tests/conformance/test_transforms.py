"""A few cases of every op under every transform, on the backends that run anywhere."""

from __future__ import annotations

import pytest

from opmux import registry
from opmux.testing import TRANSFORMS, applies, conformance_params, expected_rejections, transformed


@pytest.mark.parametrize(
    ("subject", "case"), conformance_params(registry.ops(), ["interpret", "xla"], select=transformed)
)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms(subject, case, transform):
    if not applies(subject, transform, case):
        pytest.skip("needs more, or floating, arrays than the case has")
    with expected_rejections():
        subject.decision(case)
        TRANSFORMS[transform](subject, case)

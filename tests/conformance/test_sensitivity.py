"""Every parameter of every op matters to the backends that run anywhere."""

from __future__ import annotations

import pytest

from opmux import registry
from opmux.testing import Subject, check_sensitivity, expected_rejections, implemented_ops

PARAMS = [
    pytest.param(Subject.of(op, backend), parameter, id=f"{op}-{parameter}-{backend}")
    for backend in ("interpret", "xla")
    for op in implemented_ops(backend)
    for parameter in registry.ops()[op].signature.parameters
]


@pytest.mark.parametrize(("subject", "parameter"), PARAMS)
def test_sensitivity(subject, parameter):
    with expected_rejections():
        check_sensitivity(subject, parameter)

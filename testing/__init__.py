"""The conformance kit: what a backend has to hold, as functions that any backend author can run.

    import opmux.testing

    opmux.testing.check("acme")                      # every op that the backend implements, every check
    opmux.testing.check("acme", "attention", "everything")

In a test suite, one test for each pair of a backend and a case, where cases that the backend rejects are
expected failures with the backend's own reasons:

    params = opmux.testing.conformance_params(["attention"], ["acme"])

    @pytest.mark.parametrize(("subject", "case"), params)
    def test_numerics(subject, case):
        with opmux.testing.expected_rejections():
            opmux.testing.check_numerics(subject, case)

`Subject.reference` and `Subject(op, run, oracle)` put any callable to the same test, without a registry. An op
that opmux does not ship brings its own oracle, as `oracle=`.
"""

from __future__ import annotations

from opmux.testing.conformance import (
    ConformanceError,
    Outcome,
    check,
    check_case_gradients,
    check_numerics,
    check_proof,
    implemented_ops,
)
from opmux.testing.gradients import check_gradients
from opmux.testing.parametrize import conformance_params, differentiable, expected_rejections, transformed
from opmux.testing.registration import check_implementation, check_registration
from opmux.testing.sensitivity import check_sensitivity
from opmux.testing.shard import check_shard_map
from opmux.testing.subject import Rejected, Subject, find_oracle
from opmux.testing.tolerances import assert_close, rtol
from opmux.testing.transforms import TRANSFORMS, applies, check_transforms, transform_cases

__all__ = [
    "TRANSFORMS", "ConformanceError", "Outcome", "Rejected", "Subject", "applies", "assert_close", "check",
    "check_case_gradients", "check_gradients", "check_implementation", "check_numerics", "check_proof",
    "check_registration", "check_sensitivity", "check_shard_map", "check_transforms", "conformance_params",
    "differentiable", "expected_rejections", "find_oracle", "implemented_ops", "rtol", "transform_cases",
    "transformed",
]  # fmt: skip

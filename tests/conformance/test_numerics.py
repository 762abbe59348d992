"""Every case of every op on the backends that run anywhere, against the float64 oracle."""

from __future__ import annotations

import pytest

from opmux import registry
from opmux.testing import check_numerics, conformance_params, expected_rejections

PARAMS = conformance_params(registry.ops(), ["interpret", "xla"])


@pytest.mark.parametrize(("subject", "case"), PARAMS)
def test_numerics(subject, case):
    with expected_rejections():
        check_numerics(subject, case)


def test_every_op_runs_on_every_backend():
    tested = {(param.values[0].op.name, param.values[0].backend) for param in PARAMS}
    ops = {"add", "matmul", "reduce", "attention", "chunk_fwd_h"}
    assert tested >= {(op, backend) for op in ops for backend in ("interpret", "xla")}

"""What the built-in backends have registered, and that their kernels are what is compiled."""

from __future__ import annotations

import pytest

from opmux import registry
from opmux.testing import Subject, check_proof, check_registration, implemented_ops

PARAMS = [
    pytest.param(op, backend, id=f"{op}-{backend}")
    for backend in registry.backends()
    for op in implemented_ops(backend)
]


@pytest.mark.parametrize(("op", "backend"), PARAMS)
def test_registration(op, backend):
    check_registration(registry.ops()[op], backend)


@pytest.mark.parametrize(("op", "backend"), [param for param in PARAMS if param.values[1] in ("interpret", "xla")])
def test_the_backend_that_was_asked_for_is_compiled(op, backend):
    subject = Subject.of(op, backend)
    check_proof(subject, next(iter(subject.op.cases())))

"""The kit under pytest, which is imported only when one of these is called."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

from opmux import registry
from opmux.core.cases.case import Case
from opmux.testing.subject import Rejected, Subject, arguments, floating
from opmux.testing.transforms import transform_cases

Select = Callable[[Subject, Case], bool]


def conformance_params(
    ops: Iterable[str],
    backends: Iterable[str],
    *,
    oracles: dict[str, Callable[..., Any]] | None = None,
    select: Select | None = None,
) -> list[Any]:
    """A `pytest.param(subject, case)` for each op, backend and case, with the id `op-case-backend`.

    Backends that do not implement an op are left out.

    Args:
      ops: names of ops.
      backends: names of backends.
      oracles: by op, for ops that opmux does not ship.
      select: keeps only the pairs for which it is true; see `differentiable` and `transformed`.

    Returns:
      What `pytest.mark.parametrize(("subject", "case"), ...)` takes.
    """
    import pytest

    backends = list(backends)
    params: list[Any] = []
    for op in ops:
        implementing = {implementation.backend for implementation in registry.implementations(op)}
        for backend in backends:
            if backend not in implementing:
                continue
            subject = Subject.of(op, backend, (oracles or {}).get(op))
            params += [
                pytest.param(subject, case, id=f"{op}-{case.name}-{backend}")
                for case in subject.op.cases()
                if select is None or select(subject, case)
            ]
    return params


def differentiable(subject: Subject, case: Case) -> bool:
    """Whether a case has gradients to check."""
    return case.grad and bool(floating(arguments(subject.op, case)[0]))


def transformed(subject: Subject, case: Case) -> bool:
    """Whether a case runs under every transform."""
    return any(case.name == chosen.name for chosen in transform_cases(subject.op))


@contextlib.contextmanager
def expected_rejections() -> Generator[None]:
    """Reports a case that the backend rejects as an expected failure, with the backend's own reasons."""
    import pytest

    try:
        yield
    except Rejected as rejected:
        pytest.xfail(str(rejected))

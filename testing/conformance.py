"""What a backend has to hold, for each op that it implements and each case of the op.

    check(backend)
      ├─ check_registration     targets import, configs are schemas, predicates are pure and touch no device
      └─ each case
           ├─ check_numerics    dtypes, shapes and values against the float64 oracle
           ├─ check_gradients   against finite differences of the oracle
           └─ check_transforms  the few cases that are marked for it
      ├─ check_proof            the compiled program holds the backend's kernel
      └─ check_sensitivity      each argument matters

A case that the backend rejects raises `Rejected` with the predicate's own reasons, after it was seen to raise
`ForcedBackendError` when forced; a test suite reports that as an expected failure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from opmux import registry
from opmux.core.cases.case import Case
from opmux.testing.gradients import check_gradients
from opmux.testing.registration import check_registration
from opmux.testing.sensitivity import check_sensitivity
from opmux.testing.subject import Rejected, Subject, arguments, floating, longest_axis, quick_jit, run_reference
from opmux.testing.tolerances import assert_close, rtol
from opmux.testing.transforms import TRANSFORMS, applies, transform_cases


def check_numerics(subject: Subject, case: Case) -> None:
    """Checks the results of one case: structure, shapes, dtypes and weak types as declared; values as the oracle's.

    Raises:
      Rejected: the backend does not take the case.
      AssertionError: something differs.
    """
    subject.decision(case)
    args, kwargs = case.arguments()
    arrays, rest = arguments(subject.op, case)
    declared = jax.eval_shape(lambda: run_reference(subject.op, args, kwargs))
    got = quick_jit(lambda arrays: subject.run(**arrays, **rest))(arrays)
    what = f"{subject} {case.name}"
    structures = jax.tree.structure(got), jax.tree.structure(declared)
    assert structures[0] == structures[1], f"{what}: returns {structures[0]}, not {structures[1]}"
    want = subject.wanted({**arrays, **rest})
    for number, (one, spec, other) in enumerate(
        zip(jax.tree.leaves(got), jax.tree.leaves(declared), want, strict=True)
    ):
        label = f"{what}: result {number}"
        assert one.dtype == spec.dtype, f"{label}: dtype {one.dtype}, not {spec.dtype}"
        assert one.weak_type == spec.weak_type, f"{label}: weak_type {one.weak_type}"
        assert one.shape == spec.shape, f"{label}: shape {one.shape}, not {spec.shape}"
        tolerance = rtol(one.dtype, longest_axis(arrays)) if case.rtol is None else case.rtol
        assert_close(one, other, tolerance, label, exact_zeros=True)


def check_case_gradients(subject: Subject, case: Case) -> None:
    """`check_gradients`, for a backend that may reject the case."""
    subject.decision(case)
    check_gradients(subject, case)


def check_proof(subject: Subject, case: Case) -> None:
    """Checks that the program that is compiled for a case holds the kernel of the backend, and of no other.

    Raises:
      Rejected: the backend does not take the case.
      AssertionError: the kernel's scope is not in the lowered text.
    """
    decision = subject.decision(case)
    assert decision is not None, "a callable that is no registered backend proves nothing"
    args, kwargs = case.arguments()
    text = registry.get(subject.op.name, backend=subject.backend).lower(*args, **kwargs).as_text(debug_info=True)
    assert f"opmux.{subject.op.name}[{subject.backend}]" in text, f"{subject} {case.name}: its kernel is not compiled"


@dataclass(frozen=True)
class Outcome:
    """What one check of one case came to; `state` is `passed`, `rejected` or `failed`."""

    op: str
    check: str
    case: str
    state: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.state:<8}  {self.op} {self.check} {self.case}" + (
            f"\n          {self.detail}" * bool(self.detail)
        )


class ConformanceError(AssertionError):
    """A backend failed checks; `outcomes` holds all of them."""

    def __init__(self, backend: str, outcomes: list[Outcome]) -> None:
        super().__init__(backend, outcomes)
        self.backend = backend
        self.outcomes = outcomes

    def __str__(self) -> str:
        failed = [outcome for outcome in self.outcomes if outcome.state == "failed"]
        lines = [f"backend {self.backend!r}: {len(failed)} of {len(self.outcomes)} checks failed"]
        return "\n".join([*lines, *map(str, failed)])


def check(
    backend: str,
    op: str | None = None,
    case: str | None = None,
    *,
    oracle: Callable[..., Any] | None = None,
    checks: Iterable[str] = ("registration", "numerics", "gradients", "transforms", "sensitivity", "proof"),
) -> list[Outcome]:
    """Runs the whole kit on a registered backend.

    Args:
      backend: the backend's name.
      op: only this op, rather than all that the backend implements.
      case: only the case of this name.
      oracle: the float64 oracle of `op`, for an op that opmux does not ship: a NumPy function with its signature.
      checks: which checks to run.

    Returns:
      The outcome of every check. Cases that the backend rejects are `rejected`, with its reasons.

    Raises:
      ConformanceError: a check failed, or nothing at all ran on the backend.
      UnknownOpError, UnknownBackendError: there is no such op or backend.
    """
    wanted = set(checks)
    registry.get(op or next(iter(registry.ops())), backend=backend)  # a name that means nothing is an error of its own
    outcomes: list[Outcome] = []
    for name in [op] if op is not None else implemented_ops(backend):
        subject = Subject.of(name, backend, oracle)
        for check_name, case_name, run in _plan(subject, case, wanted):
            outcomes.append(_outcome(name, check_name, case_name, run))
    ran = [outcome for outcome in outcomes if outcome.check == "numerics" and outcome.state == "passed"]
    if "numerics" in wanted and not ran:
        outcomes.append(Outcome(op or "*", "numerics", case or "*", "failed", "nothing ran on this backend"))
    if any(outcome.state == "failed" for outcome in outcomes):
        raise ConformanceError(backend, outcomes)
    return outcomes


def implemented_ops(backend: str) -> list[str]:
    """The forward ops that a backend implements."""
    found = [implementation.op for implementation in registry.implementations() if implementation.backend == backend]
    return [name for name in registry.ops() if name in found]


def _plan(subject: Subject, only: str | None, wanted: set[str]) -> Iterator[tuple[str, str, Callable[[], None]]]:
    op = subject.op
    cases = [case for case in op.cases() if only in (None, case.name)]
    if "registration" in wanted and only is None:
        yield "registration", "", lambda: check_registration(op, subject.backend)
    for case in cases:
        if "numerics" in wanted:
            yield "numerics", case.name, lambda case=case: check_numerics(subject, case)
        if "gradients" in wanted and case.grad and floating(arguments(op, case)[0]):
            yield "gradients", case.name, lambda case=case: check_case_gradients(subject, case)
    marked = {case.name for case in transform_cases(op)}
    chosen = [case for case in cases if only is not None or case.name in marked]
    for case in chosen if "transforms" in wanted else []:
        for name, run in TRANSFORMS.items():
            if applies(subject, name, case):
                yield f"transforms/{name}", case.name, lambda run=run, case=case: _with_decision(run, subject, case)
    if "proof" in wanted:
        yield "proof", cases[0].name, lambda: check_proof(subject, cases[0])
    if "sensitivity" in wanted and only is None:
        for parameter in op.signature.parameters:
            yield "sensitivity", parameter, lambda parameter=parameter: check_sensitivity(subject, parameter)


def _with_decision(run: Callable[[Subject, Case], None], subject: Subject, case: Case) -> None:
    subject.decision(case)
    run(subject, case)


def _outcome(op: str, check: str, case: str, run: Callable[[], None]) -> Outcome:
    try:
        run()
    except Rejected as rejected:
        return Outcome(op, check, case, "rejected", str(rejected))
    except Exception as error:  # one broken case must not hide the others
        return Outcome(op, check, case, "failed", f"{type(error).__name__}: {error}")
    return Outcome(op, check, case, "passed")

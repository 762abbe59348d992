"""No argument is ignored: where the oracle says that one matters, it matters to the backend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core.cases.case import Case
from opmux.core.errors import ArgumentError
from opmux.testing.subject import Subject, run_reference

CHANGE = 0.05
"""How much of the scale of a result has to change for an argument to matter; far above any tolerance."""

Arguments = dict[str, Any]


def check_sensitivity(subject: Subject, parameter: str) -> None:
    """Checks that a parameter matters to the implementation.

    The first case is taken whose results, by the oracle or by their declared dtypes and shapes, change when the
    parameter is left out, given another value that occurs in a case, or (for an array) other values. The
    implementation's results have to change as well.

    A parameter that only trades accuracy for speed changes neither; then at least the request must show it.

    Raises:
      Rejected: the backend takes no such case.
      AssertionError: the parameter is ignored, or no case shows that it matters.
    """
    op = subject.op
    cases = sorted(op.cases(), key=_nbytes)
    bound = {case.name: dict(op.bind(*case.arguments()).arguments) for case in cases}
    given = [case for case in cases if bound[case.name].get(parameter) is not None]
    assert given, f"{op.name}: no case gives {parameter!r}"
    shown = False
    for case in given:
        arguments = bound[case.name]
        for changed in _variants(subject, parameter, arguments, [bound[other.name].get(parameter) for other in given]):
            try:
                before, after = (_expected(subject, one) for one in (arguments, changed))
                shown |= op.request((), _prepared(subject, arguments)) != op.request((), _prepared(subject, changed))
            except ArgumentError:
                continue
            if not _differ(before, after):
                continue
            for one in (arguments, changed):
                subject.decision(dataclasses.replace(case, build=lambda _, one=one: ((), dict(one))))
            got = [jax.tree.leaves(subject.run(**one)) for one in (arguments, changed)]
            assert _differ(*got), f"{subject} {case.name}: {parameter!r} is ignored"
            return
    assert shown, f"{op.name}: no case shows that {parameter!r} matters"


def _expected(subject: Subject, arguments: Arguments) -> list[Any]:
    """The oracle's results in the declared dtypes."""
    declared = jax.tree.leaves(jax.eval_shape(lambda: run_reference(subject.op, (), arguments)))
    with np.errstate(over="ignore", invalid="ignore"):
        return [one.astype(spec.dtype) for one, spec in zip(subject.wanted(arguments), declared, strict=True)]


def _differ(before: list[Any], after: list[Any]) -> bool:
    specs = [[(leaf.shape, leaf.dtype) for leaf in leaves] for leaves in (before, after)]
    return specs[0] != specs[1] or any(map(_changed, before, after))


def _changed(before: Any, after: Any) -> bool:
    one, other = (np.asarray(leaf).astype(np.complex128) for leaf in (before, after))
    if (np.isfinite(one) != np.isfinite(other)).any():
        return True
    one, other = (np.where(np.isfinite(leaf), leaf, 0) for leaf in (one, other))
    scale = max(np.abs(one).max(initial=0.0), np.abs(other).max(initial=0.0))
    return bool((np.abs(one - other) > CHANGE * scale).any())


def _variants(subject: Subject, parameter: str, arguments: Arguments, values: list[Any]) -> Iterator[Arguments]:
    value: Any = arguments[parameter]
    if subject.op.signature.parameters[parameter].default is not subject.op.signature.empty:
        yield {name: other for name, other in arguments.items() if name != parameter}
    if not _is_array(value):
        plain = (other for other in values if not _is_array(other) and other != value)
        yield from ({**arguments, parameter: other} for other in plain)
    elif jnp.issubdtype(value.dtype, jnp.inexact):
        yield {**arguments, parameter: (value * 1.5 + 0.25).astype(value.dtype)}
    elif value.dtype == bool:
        yield {**arguments, parameter: ~value}
    else:
        yield {**arguments, parameter: np.roll(value, 1, axis=-1)}
        yield {**arguments, parameter: value // 2}


def _prepared(subject: Subject, arguments: Arguments) -> Arguments:
    return arguments if subject.op.prepare is None else subject.op.prepare(dict(arguments))


def _is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray | np.generic)


def _nbytes(case: Case) -> int:
    args, kwargs = case.arguments()
    return sum(value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, np.ndarray))

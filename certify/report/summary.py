"""What both reports say: how each implementation fared in each check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from opmux.certify.results import CompileResult, Report, SimulateResult
from opmux.certify.targets import TARGETS

Verdict = Literal["ok", "failed", "worse", "refused", ""]
"""`ok`: all that was not refused is fine; `worse`: than the baseline; `refused`: everything was; empty: not done."""

VALUES = "value"
RACES = "races"
CHECKS = {VALUES: ("numerics", "error"), RACES: ("race", "out-of-bounds", "uninitialised", "barrier", "hang")}
"""Checks of a simulated run, each with the kinds of failure that it is about."""


@dataclass(frozen=True)
class Cell:
    """How one implementation fared in one check.

    Attributes:
      verdict: of all runs or programs together.
      counts: how many of them, by status.
    """

    verdict: Verdict
    counts: dict[str, int]

    def __str__(self) -> str:
        if not self.verdict:
            return ""
        return {"ok": "ok", "failed": "FAIL", "worse": "worse", "refused": "no"}[self.verdict]


def implementations(report: Report) -> list[tuple[str, str]]:
    """Backend and op of every implementation that the report is about."""
    results: Iterable[CompileResult | SimulateResult] = (*report.simulated, *report.compiled)
    return sorted({(found.backend, found.op) for found in results})


def columns(report: Report) -> list[str]:
    """The checks of the report: of simulated runs, and one for each target."""
    compiled = {found.target for found in report.compiled}
    return [*(CHECKS if report.simulated else ()), *(name for name in TARGETS if name in compiled)]


def cell(report: Report, backend: str, op: str, column: str) -> Cell:
    """How an implementation fared in a check."""
    if column in CHECKS:
        return _simulated([found for found in report.simulated if (found.backend, found.op) == (backend, op)], column)
    found = [each for each in report.compiled if (each.backend, each.op, each.target) == (backend, op, column)]
    worse = {regression.key for regression in report.regressions}
    return _cell([each.status for each in found], any(each.key in worse for each in found))


def short(column: str) -> str:
    """A column's name without what all TPUs have in common."""
    return column.removeprefix("tpu-")


def sentence(report: Report) -> str:
    """The whole report in a sentence."""
    refused = sum(found.status == "refused" for found in (*report.simulated, *report.compiled))
    parts = [_count(len(report.simulated), "simulated run"), _count(len(report.compiled), "compiled program")]
    outcomes = [
        f"{len(report.failures)} failed" if report.failures else "none failed",
        _count(len(report.regressions), "figure") + " worse than the baseline" if report.regressions else "",
        f"{refused} refused by the implementation itself" if refused else "",
    ]
    return f"{' and '.join(filter(None, parts))}: {', '.join(filter(None, outcomes))}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}" if number else ""


def _simulated(found: list[SimulateResult], column: str) -> Cell:
    statuses = [
        "ok" if each.status not in ("ok", "refused") and each.kind not in CHECKS[column] else each.status
        for each in found
    ]
    return _cell(statuses, worse=False)


def _cell(statuses: list[str], worse: bool) -> Cell:
    counts = {status: statuses.count(status) for status in dict.fromkeys(statuses)}
    verdict: Verdict = ""
    if set(counts) - {"ok", "refused"}:
        verdict = "failed"
    elif worse:
        verdict = "worse"
    elif "ok" in counts:
        verdict = "ok"
    elif counts:
        verdict = "refused"
    return Cell(verdict, counts)

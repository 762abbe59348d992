"""Reports as lines of text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from opmux.certify.baseline import PROGRAM
from opmux.certify.report import summary
from opmux.certify.results import CompileResult, Regression, Report

_NAME = 17
_TIE = "\0"
"""Stands for a space that no line may end at."""
_CELL = 5
_LEGEND = (
    "ok: all of them; FAIL: one or more failed; worse: than the baseline; no: refused by the implementation itself"
)


def lines(report: Report, width: int = 80) -> list[str]:
    """A table of implementations by checks, what failed, what got worse, what was not done, and a sentence."""
    found = [*_table(report), ""]
    for failure in report.failures:
        found += [f"FAIL  {failure.key}", *_indented(failure.words or failure.status, width)]
    for regression in report.regressions:
        found += [f"WORSE {regression.key}", *_indented(change(regression), width)]
    for reason in report.skipped:
        found += textwrap.wrap(f"not done: {reason}", width, subsequent_indent="  ", break_on_hyphens=False)
    return [*found, *textwrap.wrap(summary.sentence(report), width)]


def change(regression: Regression) -> str:
    """One figure that got worse, or what is not there any more."""
    if regression.found == 0 and regression.figure in ("compiles", "present"):
        return f"{regression.kernel}: {'compiled' if regression.figure == 'compiles' else 'was there'} before"
    where = "" if regression.kernel == PROGRAM else f"{regression.kernel}: "
    allowed = f"{regression.tolerance:.0%} more is allowed" if regression.tolerance else "no more is allowed"
    return f"{where}{regression.figure} {number(regression.baseline)} -> {number(regression.found)} ({allowed})"


def _table(report: Report) -> list[str]:
    columns = summary.columns(report)
    head = [summary.short(column) for column in columns]
    found = [_row("", head)]
    backend = ""
    for one, op in summary.implementations(report):
        if one != backend:
            backend = one
            found.append(backend)
        found.append(_row(f"  {op}", [str(summary.cell(report, backend, op, column)) for column in columns]))
    return [*found, "", *textwrap.wrap(_LEGEND, 80)]


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:<{_NAME}} {' '.join(f'{cell:<{_CELL}}' for cell in cells)}".rstrip()


def _indented(text: str, width: int) -> list[str]:
    found: list[str] = []
    for line in text.splitlines():
        found += textwrap.wrap(line, width, initial_indent="      ", subsequent_indent="        ") or [""]
    return found


def figures(result: CompileResult, width: int = 80) -> list[str]:
    """Everything that was measured of one program."""
    how = "from the cache" if result.cached else f"{result.seconds:.1f} s"
    found = [f"{result.target}  {result.backend or 'no backend'}  {result.status}  {how}"]
    if result.words:
        found += _indented(result.words, width)
    if result.estimate is not None:
        parts = [
            f"{name} {seconds(value)}"
            for name, value in (
                ("memory", result.estimate.memory_seconds),
                ("compute", result.estimate.compute_seconds),
                ("schedule", result.estimate.schedule_seconds),
            )
            if value
        ]
        least = f"at least {seconds(result.estimate.seconds)}, bound by {result.estimate.bound}"
        found += _pair("estimate", f"{least} ({', '.join(parts)}); from declared rates, not a timing", width)
    if result.hbm_bytes:
        found += _pair("HBM", f"{number(result.hbm_bytes)} bytes", width)
    for kernel in result.kernels:
        text = "  ".join(f"{name}{_TIE}{number(value)}" for name, value in kernel.figures.items())
        found += _pair(kernel.kernel, text, width)
        found += [line for warning in kernel.warnings for line in _pair("", warning, width)]
        found += [line for kind, path in kernel.files.items() for line in _pair("", f"{kind}: {path}", width)]
    return found


def _pair(name: str, text: str, width: int) -> list[str]:
    found = textwrap.wrap(
        text, width, initial_indent=f"  {name:<{_NAME}} ", subsequent_indent=" " * (_NAME + 3), break_on_hyphens=False,
        break_long_words=False,
    )  # fmt: skip
    return [line.replace(_TIE, " ") for line in found]


def number(value: float) -> str:
    """A figure with as many digits as it has, or a few."""
    return f"{int(value):,}" if value == int(value) else f"{value:.4g}"


def seconds(value: float) -> str:
    """A time in a unit that fits."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"

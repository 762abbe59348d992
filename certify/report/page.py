"""The report as one self-contained page: HTML, a style and inline charts; nothing is loaded, no script runs."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from opmux.certify.baseline import Baseline
from opmux.certify.report import programs, runs, summary, table
from opmux.certify.results import Report


def render(report: Report, baseline: Baseline | None = None, folder: Path | None = None) -> str:
    """The page.

    Args:
      report: what was found.
      baseline: figures of earlier runs, to show differences to.
      folder: where the page will lie; links to dumped texts are relative to it.
    """
    failed, worse = bool(report.failures), bool(report.regressions)
    return Template(_asset("page.html")).substitute(
        style=_asset("page.css"),
        verdict="failed" if failed else "worse than the baseline" if worse else "fine",
        **{"class": "failed" if failed else "worse" if worse else "ok"},
        sentence=escape(summary.sentence(report)),
        level=report.level,
        versions=escape(", ".join(f"{name} {version}" for name, version in report.versions.items())),
        body="\n".join(_body(report, baseline or Baseline({}), folder or Path())),
    )


def _asset(name: str) -> str:
    return resources.files("opmux.certify.report").joinpath(name).read_text(encoding="utf-8")


def _body(report: Report, baseline: Baseline, folder: Path) -> Iterator[str]:
    yield from _matrix(report)
    yield from _problems(report)
    for backend, op in summary.implementations(report):
        yield f'<h2 id="{anchor(backend, op)}">{escape(backend)} {escape(op)}</h2>'
        yield from runs.section([found for found in report.simulated if (found.backend, found.op) == (backend, op)])
        compiled = [found for found in report.compiled if (found.backend, found.op) == (backend, op)]
        yield from programs.section(compiled, report, baseline, folder)


def anchor(backend: str, op: str) -> str:
    """Where the page tells of an implementation."""
    return escape(f"{backend}-{op}")


def _matrix(report: Report) -> Iterator[str]:
    columns = summary.columns(report)
    yield '<div class="scroll"><table class="matrix"><thead><tr><th></th>'
    yield "".join(f"<th>{escape(summary.short(column))}</th>" for column in columns)
    yield "</tr></thead><tbody>"
    for backend, op in summary.implementations(report):
        yield f"<tr><th>{escape(backend)} {escape(op)}</th>"
        for column in columns:
            found = summary.cell(report, backend, op, column)
            if not found.verdict:
                yield "<td></td>"
                continue
            counts = ", ".join(f"{count} {status}" for status, count in found.counts.items())
            link = f'<a href="#{anchor(backend, op)}">{found}<small>{counts}</small></a>'
            yield f'<td class="{found.verdict}">{link}</td>'
        yield "</tr>"
    yield "</tbody></table></div>"


def _problems(report: Report) -> Iterator[str]:
    if report.failures:
        yield f"<h3>Failed ({len(report.failures)})</h3>"
    for failure in report.failures:
        yield f'<div><span class="pill failed">{failure.status}</span> <code>{escape(failure.key)}</code></div>'
        yield f"<pre>{escape(failure.words or 'It said nothing.')}</pre>"
    if report.regressions:
        yield f"<h3>Worse than the baseline ({len(report.regressions)})</h3><ul>"
        for regression in report.regressions:
            yield f"<li><code>{escape(regression.key)}</code>: {escape(table.change(regression))}</li>"
        yield "</ul>"
    if report.skipped:
        yield "<h3>Not done</h3><ul>"
        yield from (f"<li>{escape(reason)}</li>" for reason in report.skipped)
        yield "</ul>"

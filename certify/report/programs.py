"""The part of the page on compiled programs: estimates, figures by target, differences to the baseline."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from opmux.certify import targets
from opmux.certify.baseline import PROGRAM, Baseline, Figures, figures_of, is_worse
from opmux.certify.report import charts, summary
from opmux.certify.report.table import number, seconds
from opmux.certify.results import CompileResult, KernelMeasures, Report
from opmux.core.devices import Device

_LIMITS = {
    "registers": "registers_per_thread", "fixed_registers": "registers_per_thread",
    "smem_dynamic_bytes": "smem_per_block", "vmem_bytes": "vmem_bytes", "smem_bytes": "smem_bytes",
}  # fmt: skip
"""Figures that a device has a limit for: the field of `Device`."""

_SHOWN_AT_ZERO = ("spills", "fills", "spill_store_bytes", "spill_load_bytes", "fixed_spill_bytes", "LDL", "STL")


def section(found: Sequence[CompileResult], report: Report, baseline: Baseline, folder: Path) -> Iterator[str]:
    """Rooflines by target, and a table of figures by target for each workload."""
    if not found:
        return
    names = [name for name in targets.TARGETS if any(each.target == name for each in found)]
    roofs = [(name, _roof(name, [each for each in found if each.target == name])) for name in names]
    if any(roof for _, roof in roofs):
        yield "<h3>Roofline</h3>" + _KEY
        yield '<div class="roofs">'
        for name, roof in roofs:
            yield f"<figure><figcaption>{summary.short(name)}</figcaption>{roof}</figure>"
        yield "</div>"
    for workload in dict.fromkeys(each.workload for each in found):
        results = {each.target: each for each in found if each.workload == workload}
        bad = any(each.status not in ("ok", "refused") for each in results.values())
        worse = {regression.key for regression in report.regressions} & {each.key for each in results.values()}
        pill = "failed" if bad else "worse" if worse else "ok"
        yield f"<details{' open' if bad or worse else ''}><summary>{escape(workload)} "
        yield f'<span class="pill {pill}">{pill}</span></summary>'
        yield from _workload([results.get(name) for name in names], names, report, baseline, folder)
        yield "</details>"


_KEY = (
    '<p class="dim">Operations a second by the estimate, which is bound by '
    + ", ".join(f'<span class="key" style="background:var(--{part})"></span> {part}' for part in charts.PARTS)
    + ".</p>"
)


def _roof(name: str, found: Sequence[CompileResult]) -> str:
    device = targets.target(name).device
    rates = [
        each.flops / each.estimate.compute_seconds for each in found if each.estimate and each.estimate.compute_seconds
    ]
    return charts.roofline(device, found, max(rates, default=0.0))


def _workload(
    found: Sequence[CompileResult | None], names: Sequence[str], report: Report, baseline: Baseline, folder: Path
) -> Iterator[str]:
    yield f'<div class="scroll"><table class="figures" style="width:{9.5 + 10.5 * len(names)}rem"><col class="name">'
    yield f"{'<col>' * len(names)}<thead><tr><th></th>"
    yield "".join(f"<th>{summary.short(name)}</th>" for name in names)
    yield "</tr></thead><tbody>"
    yield _row("outcome", [_outcome(each) for each in found])
    longest = max((each.estimate.seconds for each in found if each and each.estimate), default=0.0)
    old = [(baseline.of(each, report.versions) if each else None) or {} for each in found]
    yield _row(
        "estimate",
        [
            f"{charts.parts(each.estimate, longest)}{seconds(each.estimate.seconds)}, {each.estimate.bound}"
            f"{_delta('estimate', old_of.get(PROGRAM, {}), each.estimate.seconds)}"
            if each and each.estimate
            else ""
            for each, old_of in zip(found, old, strict=True)
        ],
    )
    yield from _figures("hbm_bytes", PROGRAM, names, [figures_of(each) if each else {} for each in found], old)
    for kernel in dict.fromkeys(kernel.kernel for each in found if each for kernel in each.kernels):
        yield f'<tr class="kernel"><th colspan="{len(names) + 1}">{escape(kernel)}</th></tr>'
        measures = [_measures(each, kernel) for each in found]
        figures = [figures_of(each) if each else {} for each in found]
        for name in dict.fromkeys(name for each in measures if each for name in each.figures):
            yield from _figures(name, kernel, names, figures, old)
        if any(each and each.warnings for each in measures):
            yield _row("warnings", [escape("; ".join(each.warnings)) if each else "" for each in measures])
        if any(each and each.files for each in measures):
            yield _row("texts", [_links(each, folder) if each else "" for each in measures])
    yield "</tbody></table></div>"


def _figures(
    name: str, kernel: str, names: Sequence[str], found: Sequence[Mapping[str, Figures]],
    old: Sequence[Mapping[str, Figures]],
) -> Iterator[str]:  # fmt: skip
    """The row of one figure; none where it is nothing everywhere, unless that is good news."""
    values = [each.get(kernel, {}).get(name) for each in found]
    most = max((value for value in values if value is not None), default=0.0)
    if not most and name not in _SHOWN_AT_ZERO:
        return
    differ = len({value for value in values if value is not None}) > 1
    cells: list[str] = []
    for target, value, earlier in zip(names, values, old, strict=True):
        if value is None:
            cells.append("")
            continue
        limit = _limit(name, targets.target(target).device)
        scale = charts.bar(value / (limit or most)) if limit or differ else ""
        of = f' <span class="dim">of {_text(name, limit)}</span>' if limit else ""
        shown = f'<span title="{number(value)}">{_text(name, value)}</span>{of}'
        cells.append(f"{scale}{shown}{_delta(name, earlier.get(kernel, {}), value)}")
    yield _row(name.removesuffix("_bytes").replace("_", " "), cells)


def _text(name: str, value: float) -> str:
    """A figure; bytes in a unit that fits."""
    if not name.endswith("_bytes"):
        return number(value)
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{number(value)} B"


def _limit(name: str, device: Device) -> float:
    return float(getattr(device, _LIMITS[name])) if name in _LIMITS else 0.0


def _delta(name: str, old: Mapping[str, float], value: float) -> str:
    """The difference to the baseline; nothing where there is none."""
    if name not in old or old[name] == value:
        return ""
    change = f"{value / old[name] - 1:+.1%}" if old[name] else f"+{number(value)}"
    kind = "worse" if is_worse(name, old[name], value) else "up" if value > old[name] else "down"
    return f' <span class="delta {kind}" title="baseline {number(old[name])}">{change}</span>'


def _outcome(found: CompileResult | None) -> str:
    if found is None:
        return ""
    kind = found.status if found.status in ("ok", "refused") else "failed"
    words = f'<div class="dim">{escape(found.words)}</div>' if found.words else ""
    return f'<span class="pill {kind}">{found.status}</span>{words}'


def _measures(found: CompileResult | None, kernel: str) -> KernelMeasures | None:
    return next((each for each in found.kernels if each.kernel == kernel), None) if found else None


def _links(kernel: KernelMeasures, folder: Path) -> str:
    links = {kind: quote(os.path.relpath(path, folder.absolute())) for kind, path in kernel.files.items()}
    return " ".join(f'<a href="{escape(link)}">{escape(kind)}</a>' for kind, link in links.items())


def _row(name: str, cells: Sequence[str]) -> str:
    return f"<tr><th>{escape(name)}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"

"""Small charts as inline SVG. Colours are classes of the page's style, so that they follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from opmux.certify.report.table import seconds
from opmux.certify.results import CompileResult, Estimate
from opmux.core.devices import Device

PARTS = ("memory", "compute", "schedule")


def bar(share: float, colour: str = "bar", width: int = 110) -> str:
    """A horizontal bar that fills a share of its track."""
    filled = max(0.0, min(1.0, share)) * width
    return (
        f'<svg width="{width}" height="6" viewBox="0 0 {width} 6" aria-hidden="true">'
        f'<rect width="{width}" height="5" rx="2" fill="var(--soft)"/>'
        f'<rect width="{filled:.1f}" height="5" rx="2" fill="var(--{colour})"/></svg>'
    )


def parts(estimate: Estimate, longest: float) -> str:
    """One bar for each part of an estimate, on the scale of the longest estimate beside it."""
    values = (estimate.memory_seconds, estimate.compute_seconds, estimate.schedule_seconds)
    return "".join(
        f'<div title="{name} {seconds(value)}">{bar(value / longest if longest else 0.0, name)}</div>'
        for name, value in zip(PARTS, values, strict=True)
        if value
    )


def roofline(device: Device, results: Sequence[CompileResult], peak: float) -> str:
    """The roof of a device, and where programs come to under it by their estimates.

    Both axes are logarithmic: operations for each byte of device memory, and operations a second.
    """
    dots = [
        (found.flops / found.hbm_bytes, found.flops / found.estimate.seconds, found)
        for found in results
        if found.flops and found.hbm_bytes and found.estimate is not None and found.estimate.seconds
    ]
    if not dots or not device.hbm_bandwidth:
        return ""
    ridge = peak / device.hbm_bandwidth if peak else 0.0
    left = min(x for x, _, _ in dots) / 4
    right = max(ridge * 8, max(x for x, _, _ in dots) * 8)
    top = max(peak, max(y for _, y, _ in dots)) * 3 if peak else device.hbm_bandwidth * right
    bottom = min(min(y for _, y, _ in dots) / 4, left * device.hbm_bandwidth)
    frame = _Frame(left, right, bottom, top)
    roof = [(left, left * device.hbm_bandwidth)]
    roof += [(ridge, peak), (right, peak)] if peak else [(right, right * device.hbm_bandwidth)]
    line = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in roof)
    marks = "".join(
        f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5" fill="var(--{_bound(found)})">'
        f"<title>{escape(found.workload)}: {x:.3g} operations a byte, {_rate(y)}, bound by {_bound(found)}</title>"
        "</circle>"
        for x, y, found in dots
    )
    label = f"{_rate(peak)}" if peak else "no peak is declared"
    return (
        f'<svg width="{frame.width}" height="{frame.height}" viewBox="0 0 {frame.width} {frame.height}" role="img" '
        f'aria-label="roofline of {escape(device.name)}">'
        f'<rect x="{frame.pad}" y="4" width="{frame.width - frame.pad - 4}" height="{frame.height - 22}" '
        'fill="none" stroke="var(--line)"/>'
        f'<polyline points="{line}" fill="none" stroke="var(--ink)" stroke-width="1.2"/>{marks}'
        f'<text x="{frame.width - 8}" y="{max(4.0, frame.y(roof[-1][1])) + 13:.1f}" text-anchor="end">{label}</text>'
        f'<text x="{frame.pad}" y="{frame.height - 6}">{left:.2g}</text>'
        f'<text x="{frame.width - 4}" y="{frame.height - 6}" text-anchor="end">{right:,.0f} operations/byte</text>'
        "</svg>"
    )


class _Frame:
    """Maps logarithms of the two axes to points of a chart."""

    width, height, pad = 210, 120, 4

    def __init__(self, left: float, right: float, bottom: float, top: float):
        self._x, self._y = (math.log(left), math.log(right)), (math.log(bottom), math.log(top))

    def x(self, value: float) -> float:
        low, high = self._x
        return self.pad + (math.log(value) - low) / (high - low) * (self.width - self.pad - 4)

    def y(self, value: float) -> float:
        low, high = self._y
        return 4 + (high - math.log(value)) / (high - low) * (self.height - 22)


def _bound(found: CompileResult) -> str:
    return found.estimate.bound if found.estimate is not None else "memory"


def _rate(value: float) -> str:
    for unit, scale in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}op/s"
    return f"{value:.3g} op/s"

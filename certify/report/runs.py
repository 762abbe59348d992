"""The part of the page on simulated runs: cases by modes of the simulator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from opmux.certify.results import SimulateResult


def section(found: Sequence[SimulateResult]) -> Iterator[str]:
    """A table of cases by modes; each cell says how far the values were from the oracle, or what went wrong."""
    if not found:
        return
    modes = list(dict.fromkeys(each.mode for each in found))
    by_place = {(each.case, each.mode): each for each in found}
    failed = sum(each.status not in ("ok", "refused") for each in found)
    said = f"{failed} of {len(found)} failed" if failed else f"{len(found)} fine"
    yield f"<details{' open' if failed or len(found) <= 16 else ''}><summary>Simulated: {said}</summary>"
    yield '<p class="dim">Largest error in units of the tolerance, to a power of two; kinds of failure.</p>'
    yield '<div class="scroll"><table class="runs"><thead><tr><th>case</th>'
    yield "".join(f"<th>{escape(mode)}</th>" for mode in modes)
    yield "</tr></thead><tbody>"
    for case in dict.fromkeys(each.case for each in found):
        yield f"<tr><th>{escape(case)}</th>"
        yield from (_cell(by_place.get((case, mode))) for mode in modes)
        yield "</tr>"
    yield "</tbody></table></div></details>"


def _cell(found: SimulateResult | None) -> str:
    if found is None:
        return "<td></td>"
    kind = found.status if found.status in ("ok", "refused") else "failed"
    text = {"ok": f"ok {found.error:.2g}", "refused": "refused"}.get(found.status, found.kind or found.status)
    title = f"{found.seconds:.1f} s{': ' if found.words else ''}{found.words}"
    return f'<td class="{kind}" title="{escape(title)}">{escape(text)}</td>'

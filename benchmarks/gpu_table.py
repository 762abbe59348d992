"""Rows of `gpu.py` as text of 80 columns."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]
WIDTH = 80
QUIET = ("ok", "simulated", "skipped")
"""What the summary only counts, apart from times."""


class Printer:
    """Prints rows as they come, under a heading for each task."""

    def __init__(self) -> None:
        self._task = ""

    def __call__(self, row: Row) -> None:
        if row["task"] != self._task:
            self._task = row["task"]
            print(self._task[:WIDTH])
        print(line(row), flush=True)


def line(row: Row) -> str:
    """One row."""
    if row["kind"] == "numerics" and "error" in row:
        error = f"{_short(row['error'])} of {_short(row['tolerance'])}"
        seconds = f"{row['seconds']:6.1f} s" if "seconds" in row else ""
        return _fit(f"  {row['part']:<11}{row['status']:<10}{error}{seconds}  {row.get('detail', '')}", 35)
    if row["status"] == "simulated":
        return _fit(f"  {row['part']:<24}{row['status']:<10}in {row['median_s']:.2g} s, which means nothing")
    if row["kind"] == "speed" and "median_s" in row:
        peak = f"{100 * row['of_peak']:3.0f} %" if row.get("of_peak") else "     "
        ours = f"{row['to_ours']:5.2f}x" if row.get("to_ours") is not None else " " * 6
        rate = f"{row['rate'] / (1e12 if row['unit'] == 'FLOP/s' else 1e9):7.1f} {_UNITS[row['unit']]:<8}"
        return _fit(f"  {row['part']:<24}{row['status']:<10}{_time(row['median_s'])}{rate}{peak}{ours}")
    width = 11 if row["kind"] == "numerics" else 24
    return _fit(f"  {row['part'] or 'all':<{width}}{row['status']:<10}{row.get('detail', '')}", 12 + width)


def summary(rows: Iterable[Row]) -> str:
    """How many rows came out how, what is not well, and all times that mean something."""
    rows = list(rows)
    lines = ["", "=" * WIDTH]
    for kind in ("numerics", "speed"):
        counts = Counter(row["status"] for row in rows if row["kind"] == kind)
        said = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        lines.append(f"{kind}: {said or 'no rows'}")
    shown = [row for row in rows if row["status"] not in QUIET or (row["status"] == "ok" and "median_s" in row)]
    for task in dict.fromkeys(row["task"] for row in shown):
        lines.append(task[:WIDTH])
        lines += [line(row) for row in sorted(shown, key=lambda row: "median_s" not in row) if row["task"] == task]
    if any(row.get("of_peak") for row in rows):
        lines.append("median time, rate, share of the declared peak, time in times of mosaic_gpu's")
    return "\n".join(lines)


_UNITS = {"FLOP/s": "TFLOP/s", "B/s": "GB/s"}


def _fit(text: str, indent: int = 0) -> str:
    """The text on as many lines as it takes, up to four."""
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=" " * indent, max_lines=4, placeholder=" ...")
    return "\n".join(lines)


def _short(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.1e}"


def _time(seconds: float) -> str:
    for unit, size in (("s ", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:7.3f} {unit}"
    return f"{seconds * 1e6:7.2f} us"

"""Times functions side by side: interleaved rounds, so that what else the machine does hits all of them alike.

Ratios within one run are the figures to quote; times are of this machine.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True)
class Timing:
    """Seconds a call took, and how that compares with the baseline: the first function of the group."""

    group: str
    name: str
    minimum: float
    median: float
    ratio: float
    median_ratio: float
    rounds: int
    temporary_bytes: int | None = None


def side_by_side(
    group: str, functions: Mapping[str, Callable[[], Any]], *, rounds: int = 15, seconds: float = 20.0, inner: int = 1
) -> list[Timing]:
    """Times thunks against the first of them.

    Args:
      group: heading of the rows.
      functions: thunks by name; what they return is waited for. Each is called once before anything is timed.
      rounds: how often each is timed, at most.
      seconds: no further round starts after this time, apart from the first three.
      inner: calls in one measurement, for thunks that take microseconds.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values():
        jax.block_until_ready(function())
    begun = time.perf_counter()
    for done in range(rounds):
        if done >= 3 and time.perf_counter() - begun > seconds:
            break
        for name, function in functions.items():
            # The memory that one function gives back would else be given back during the next one's time.
            jax.block_until_ready(function())
            start = time.perf_counter()
            jax.block_until_ready([function() for _ in range(inner)])
            times[name].append((time.perf_counter() - start) / inner)
    base = next(iter(times.values()))
    return [
        Timing(
            group, name, min(taken), statistics.median(taken), min(taken) / min(base),
            statistics.median(x / y for x, y in zip(taken, base, strict=True)), len(taken),
        )
        for name, taken in times.items()
    ]  # fmt: skip


def temporary_bytes(function: Any, *args: Any) -> int | None:
    """Bytes that a jitted function needs beside arguments and results; None if the platform does not say."""
    analysis = function.lower(*args).compile().memory_analysis()
    return None if analysis is None else int(analysis.temp_size_in_bytes)


def table(timings: Iterable[Timing]) -> str:
    """The timings as text of 80 columns."""
    lines = [f"{'':44} {'min':>9} {'median':>9} {'ratio':>6} {'temp':>7}"]
    group = None
    for row in timings:
        if row.group != group:
            group = row.group
            lines.append(group)
        memory = "" if row.temporary_bytes is None else f"{row.temporary_bytes / 2**20:.0f}M"
        lines.append(
            f"  {row.name:42} {_seconds(row.minimum):>9} {_seconds(row.median):>9} {row.ratio:6.2f} {memory:>7}"
        )
    return "\n".join(lines)


def _seconds(value: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value * 1e6:.2f} us"


def save(path: str | Path, timings: Iterable[Timing]) -> None:
    """Writes the timings as JSON, with what they were measured on."""
    facts = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "timings": [asdict(row) for row in timings],
    }
    Path(path).write_text(json.dumps(facts, indent=1) + "\n")

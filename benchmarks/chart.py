"""Draws timings that a benchmark wrote with `--json`: how long each function took, in units of the group's first.

python benchmarks/chart.py benchmarks/results/attention_cpu_jax_0.12.json attention_cpu.svg
"""

from __future__ import annotations

import argparse
import json
from itertools import groupby
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

_COLOURS = {"opmux": "#1f6f8b", "interpret": "#1f6f8b", "xla": "#7fb7be", "torch": "#d98e04"}
_ROW = 0.22  # inches


def main() -> None:
    """Draws one file of timings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timings", type=Path)
    parser.add_argument("picture", type=Path, help="an .svg or .png file")
    options = parser.parse_args()
    draw(json.loads(options.timings.read_text())).savefig(options.picture, bbox_inches="tight")


def draw(facts: dict[str, Any]) -> Any:
    """A figure of horizontal bars: one group a problem, one bar a function, the baseline as a line at 1."""
    groups = [(name, list(rows)) for name, rows in groupby(facts["timings"], key=lambda row: row["group"])]
    figure, axes = plt.subplots(figsize=(8, 1.2 + _ROW * sum(len(rows) for _, rows in groups)))
    place, ticks = 0.0, {}
    for name, (_, *others) in groups:
        ticks[name] = place + (len(others) - 1) / 2
        for row in others:
            colour = _COLOURS.get(row["name"], "#888888")
            axes.barh(place, row["ratio"], height=0.85, color=colour, label=row["name"])
            axes.text(row["ratio"] + 0.01, place, f"{row['ratio']:.2f}", va="center", fontsize=7)
            place += 1
        place += 0.6
    baseline = groups[0][1][0]["name"]
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(list(ticks.values()), list(ticks), fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"time in units of {baseline} (shorter is faster); JAX {facts['jax']}, {facts['device']}")
    labels = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(labels.values(), labels.keys(), loc="lower right", fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()

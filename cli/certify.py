"""`opmux certify`: implementations simulated, compiled for absent devices, measured, and compared with a baseline."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, TextIO

from opmux.cli import layout
from opmux.core.errors import SettingError

_EPILOG = """\
examples:
  opmux certify
  opmux certify --backend mosaic_tpu --op reduce --target tpu-v6e,tpu-v5e
  opmux certify --level full --json report.json --html report.html --dump texts
  opmux certify --update-baseline

Exit codes: 0 nothing failed or got worse; 1 something did; 2 wrong usage, or a
compiler is missing and nothing else was to be done.
"""


def add_parser(subparsers: layout.Subparsers) -> None:
    """Adds the command `certify`."""
    parser = subparsers.add_parser(
        "certify",
        help="prove kernels without their devices",
        description="Runs kernels in simulators of their devices, against a float64 oracle and with races detected; "
        "compiles them for devices that are absent, and compares registers, spills, schedules and estimates with the "
        "committed baseline. Needs no accelerator.",
        epilog=_EPILOG,
        formatter_class=layout.Help,
    )
    parser.add_argument("--backend", type=names, metavar="NAME[,NAME]", help="default: all that have a simulator")
    parser.add_argument("--op", type=names, metavar="NAME[,NAME]", help="default: all that a backend implements")
    parser.add_argument("--target", type=names, metavar="NAME[,NAME]", help="devices to compile for; default: all")
    parser.add_argument(
        "--level", choices=("quick", "full"), default="quick", help="a few cases and workloads (the default), or all"
    )
    parser.add_argument("--only", choices=("simulate", "compile"), help="do only one of the two")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the report as JSON; - is stdout")
    parser.add_argument("--html", metavar="FILE", type=Path, help="write the report as one self-contained page")
    parser.add_argument("--dump", metavar="DIR", type=Path, help="keep the compilers' texts; the page links to them")
    parser.add_argument("--baseline", metavar="FILE", type=Path, help="figures to compare with; default: opmux's own")
    parser.add_argument("--update-baseline", action="store_true", help="write what is found to the baseline")
    parser.add_argument("--no-cache", action="store_true", help="compile everything anew")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Certifies, writes the reports that were asked for, and prints the table; 1 if something failed.

    Raises:
      OpmuxError: a name means nothing, a file cannot be written, or nothing can be done.
    """
    from opmux.certify import certify
    from opmux.certify.baseline import COMMITTED, Baseline
    from opmux.certify.report import page, table

    outputs = [path for path in (given.json, given.html) if path is not None and str(path) != "-"]
    for path in outputs:  # not after minutes of work
        if not path.absolute().parent.is_dir():
            raise SettingError(f"{path}: there is no folder {path.absolute().parent}")
    baseline = given.baseline or COMMITTED
    if given.baseline is not None and not given.update_baseline and not given.baseline.is_file():
        raise SettingError(f"baseline {given.baseline}: there is no such file; --update-baseline makes one")
    earlier = Baseline.read(baseline)
    bar = Bar(sys.stderr)
    report = certify(
        given.backend, given.op, given.target, level=given.level,
        parts=(given.only,) if given.only else ("simulate", "compile"), baseline=baseline,
        update_baseline=given.update_baseline, dump=given.dump, cached=not given.no_cache, progress=bar,
    )  # fmt: skip
    bar.close()
    if given.html is not None:
        given.html.write_text(page.render(report, earlier, given.html.parent), encoding="utf-8")
    text = report.model_dump_json(indent=1)
    if given.json is not None and str(given.json) != "-":
        given.json.write_text(text + "\n", encoding="utf-8")
    print(text if str(given.json) == "-" else "\n".join(table.lines(report, layout.width())))
    return 0 if report.ok else 1


def names(text: str) -> list[str]:
    """Names separated by commas.

    Raises:
      argparse.ArgumentTypeError: one is empty.
    """
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: names separated by commas")
    return found


class Bar:
    """Progress on a terminal; elsewhere, a line for what failed only."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._shown = stream, stream.isatty()

    def __call__(self, done: int, total: int, last: str) -> None:
        """Shows how many of how many are done."""
        if self._shown:
            columns = layout.width()
            filled = 20 * done // total
            line = f"[{'#' * filled}{'.' * (20 - filled)}] {done}/{total} {last}"
            self._write(f"\r{line[: columns - 1]:<{columns - 1}}")
        elif not last.startswith(("ok", "refused")) or done == total:
            self._write(f"{done}/{total} {last}\n")

    def close(self) -> None:
        """Leaves the line to what comes next."""
        if self._shown:
            self._write("\r" + " " * (layout.width() - 1) + "\r")

    def _write(self, text: str) -> Any:
        self._stream.write(text)
        self._stream.flush()

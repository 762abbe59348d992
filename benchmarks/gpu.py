"""`mosaic_gpu` on the GPU that it is written for: are the results right, and how fast are they.

    python benchmarks/gpu.py [--wheels DIR] [--minutes 9] [--only PATTERNS] [--json FILE]
    python benchmarks/gpu.py --simulate --only "numerics matmul"        # on a CPU, at tiny sizes

This script has not met hardware yet: it has been run in the simulator only, where `--simulate` takes it.

Numerics: every kernel, forward and backward, against backend `xla` in float32 at the highest precision, and once more
to see that the bits are the same. Speed: medians of interleaved rounds against `jnp` (cuBLAS), backend `xla`, cuDNN by
way of `jax.nn.dot_product_attention`, and the Pallas kernels that JAX brings. At the full sizes, too, results are
compared with those of backend `xla`.

It needs a GPU of compute capability 9.0, JAX 0.10.2 or newer for it, and no network. opmux is taken from this tree
where it is not installed. `--wheels` names a folder of wheels of what else is missing (pydantic, say), which are
unpacked into a temporary folder. What the kernels refuse is a row with the reason. A kernel that raises, aborts or
hangs is a row too, and the rest goes on in another process. What does not fit in `--minutes` is left out, the least
important first. The JSON is written after each row.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpu_child import work
from gpu_site import prepare
from gpu_table import summary


def main(argv: list[str] | None = None) -> int:
    options = _options(argv)
    record = Record(options)
    with tempfile.TemporaryDirectory(prefix="opmux-gpu-") as folder:
        environment = prepare(Path(folder), options.wheels)
        if options.simulate:
            environment["JAX_PLATFORMS"] = "cpu"
        elif environment.get("JAX_PLATFORMS") == "cpu":
            raise SystemExit("JAX_PLATFORMS=cpu hides the GPU; --simulate runs without one")
        log = options.log or Path(folder) / "log"
        try:
            ended = work(_order(options, record.began), record, environment, log, options.patience)
        except (KeyboardInterrupt, SystemExit):
            record.finish(False)
            raise
    record.finish(ended)
    if record.rows:
        print(summary(record.rows))
    return 0 if ended else 1


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="time for everything (default: 9)")
    parser.add_argument("--only", default="", help="rows that have all words of one of these patterns: 'A B,C'")
    parser.add_argument("--tier", type=int, default=2, help="0: only what matters most, 1: more of it (default: all)")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to import from")
    parser.add_argument("--config", action="append", default=[], metavar="OP={JSON}", help="time this config as well")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each contender (default: 9)")
    parser.add_argument("--patience", type=float, help="silence that ends a child (default: 60 s, simulated 300 s)")
    parser.add_argument("--log", type=Path, help="where what the children print goes (default: nowhere)")
    parser.add_argument("--simulate", action="store_true", help="tiny sizes in the simulator, on a CPU")
    parser.add_argument("--list", action="store_true", help="print the names of the rows, and run nothing")
    options = parser.parse_args(argv)
    options.patience = options.patience or (300.0 if options.simulate else 60.0)
    configs: dict[str, dict[str, Any]] = {}
    for given in options.config:
        op, _, text = given.partition("=")
        try:
            config = json.loads(text)
        except json.JSONDecodeError as error:
            parser.error(f"--config {given}: {error}")
        words = " ".join(f"{name}={value}" for name, value in config.items())
        configs.setdefault(op, {})[words] = config
    options.configs = configs
    return options


def _order(options: argparse.Namespace, began: float) -> dict[str, Any]:
    """What the child is asked for."""
    return {
        "simulate": options.simulate, "only": options.only, "tier": options.tier, "rounds": options.rounds,
        "configs": options.configs, "list": options.list, "deadline": began + 60 * options.minutes,
        "done": [], "without": [],
    }  # fmt: skip


class Record:
    """What was found, on disk after each row."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.path: Path | None = options.json
        self.began = time.time()
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.command = [Path(sys.argv[0]).name, *sys.argv[1:]]
        self.finished = False

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        self.write()

    def finish(self, finished: bool) -> None:
        self.finished = finished
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        found = {
            "date": datetime.fromtimestamp(self.began, UTC).isoformat(timespec="seconds"), "command": self.command,
            "facts": self.facts, "finished": self.finished, "seconds": round(time.time() - self.began, 1),
            "rows": self.rows,
        }  # fmt: skip
        # A killed run must not leave half a file.
        draft = self.path.with_name(self.path.name + ".part")
        draft.write_text(json.dumps(found, indent=1) + "\n")
        draft.replace(self.path)


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)  # so that the child is ended, too
    raise SystemExit(main())

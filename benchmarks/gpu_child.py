"""The process that uses the GPU, watched from one that does not: a kernel that hangs or aborts ends one child only."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Protocol

from gpu_table import Printer

WORKER = Path(__file__).with_name("gpu_worker.py")
LOST = 75
"""Exit code of a child whose device answers no more; it has said why."""
GRACE = 20.0
"""Seconds after the deadline that the last row may still take."""
CHILDREN = 25
"""Most children of one run."""


class Record(Protocol):
    """Where rows go."""

    facts: dict[str, Any]

    def add(self, row: dict[str, Any]) -> None: ...


class Child:
    """One worker, and what it says."""

    def __init__(self, order: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self._log = log
        reading, writing = os.pipe()
        self._pipe = reading
        self._selector = selectors.DefaultSelector()
        self._selector.register(reading, selectors.EVENT_READ)
        self._text = b""
        self._waited: float | None = None
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, str(WORKER), json.dumps({**order, "pipe": writing})], env=environment, stdout=out,
                stderr=out, stdin=subprocess.DEVNULL, pass_fds=(writing,), start_new_session=True,
            )  # fmt: skip
        os.close(writing)

    def next(self, seconds: float) -> dict[str, Any] | None:
        """The next message; None if the child has ended, or says nothing for so long."""
        until = time.time() + seconds
        while b"\n" not in self._text:
            if not self._selector.select(max(0.0, until - time.time())):
                self._waited = seconds
                return None
            some = os.read(self._pipe, 65536)
            if not some:
                return None
            self._text += some
        text, _, self._text = self._text.partition(b"\n")
        return json.loads(text)

    def fate(self) -> tuple[str, str]:
        """What became of a child that says nothing more: `lost`, `crashed` or `hung`, and the details."""
        if self._waited is not None:
            return "hung", f"no word for {max(0.0, self._waited):.0f} s"
        code = self._process.wait()
        return "lost" if code == LOST else "crashed", f"exit code {code}: {self.last_words()}"

    def last_words(self) -> str:
        """The last line that it printed."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else "printed nothing"

    def end(self) -> None:
        """Ends it, with all that it started."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._selector.close()
        os.close(self._pipe)


def work(order: dict[str, Any], record: Record, environment: dict[str, str], log: Path, patience: float) -> bool:
    """Starts children until the list is done, and says whether it is.

    Args:
      order: what the worker is asked for; what was done is added to it.
      record: takes the rows.
      environment: of the children.
      log: where what they print goes.
      patience: seconds that a child may be silent.
    """
    printer = Printer()

    def add(row: dict[str, Any]) -> None:
        record.add(row)
        printer(row)
        order["without"].append((row["task"], row["part"]))

    for _ in range(CHILDREN):
        task, part = "", ""
        child = Child(order, environment, log)
        try:
            while message := child.next(min(patience, order["deadline"] + GRACE - time.time())):
                match message["say"]:
                    case "facts":
                        record.facts = message["facts"]
                        print(_heading(record.facts), flush=True)
                    case "tasks":
                        print("\n".join(message["tasks"]))
                    case "begin":
                        task, part = message["task"], message["part"]
                    case "row":
                        add(message["row"])
                    case "end":
                        order["done"].append(message["task"])
                    case _:
                        return True
            fate, detail = child.fate()
        finally:
            child.end()
        if not task or task in order["done"]:
            print(f"a child did not start: {detail}", file=sys.stderr)
            return False
        if fate != "lost":
            kind, op = task.split()[:2]
            add({"task": task, "kind": kind, "op": op, "part": part, "status": fate, "detail": detail})
        if not part or (fate == "lost" and (task, part) not in order["without"]):
            order["done"].append(task)
        if time.time() > order["deadline"]:
            break
    print("stopped before the end of the list", file=sys.stderr)
    return False


def _heading(facts: dict[str, Any]) -> str:
    versions = facts["versions"]
    where = "simulated on " if facts["simulated"] else ""
    text = f"{where}{facts['device_kind']}, jax {versions.get('jax')}, python {facts['python']}"
    return text if facts["simulated"] else f"{text}, dispatch {1e6 * facts['dispatch_floor_s']:.1f} us"

"""The child's side of `children.run_jobs`: reads jobs from stdin and answers on a pipe of its own.

Compilers and simulators print what they like; nothing that they print can be taken for an answer.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import signal
import sys
import time
import traceback
from typing import Any

ORPHANED = 30.0
"""Seconds past a job's limit after which a child that nobody killed ends by itself."""


def call(function: str, payload: Any) -> Any:
    """What `"package.module:function"` returns for a payload."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)(payload)


def answer(line: str) -> str:
    """Do one job; one line of JSON."""
    job = json.loads(line)
    if hasattr(signal, "alarm"):
        signal.alarm(math.ceil(job["limit"] + ORPHANED))
    start = time.perf_counter()
    found: dict[str, Any] = {}
    try:
        found["value"] = call(job["function"], job["payload"])
        text = json.dumps({**found, "seconds": time.perf_counter() - start})
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        traceback.print_exc()
        summary = "".join(traceback.format_exception_only(error)).strip()
        text = json.dumps({"error": summary, "seconds": time.perf_counter() - start})
    return text


def main() -> None:
    """Answer jobs until stdin ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    jobs = os.fdopen(os.dup(0), encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    os.dup2(2, 1)
    for line in jobs:
        answers.write(answer(line) + "\n")
        answers.flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries that hold devices, or threads that hang, have no say in when a child ends


if __name__ == "__main__":
    main()

"""Work in child processes: a compiler that aborts or a simulator that hangs is a result, never our crash.

A child does many jobs, one after the other, since starting one costs seconds:

    parent ── a job a line ──▶ stdin ─┐
                                      ├─ python worker.py
    parent ◀─ an answer a line ─ pipe ┘   stdout, stderr ──▶ a file, read when the child dies
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

_WORKER = Path(__file__).with_name("worker.py")

STARTUP = 60.0
"""Seconds that the first job of a child has on top of its limit, for starting Python and importing JAX."""

JOBS_PER_CHILD = 100
"""After so many jobs a child is replaced: compilers keep memory."""


@dataclass(frozen=True)
class Job:
    """A function to call in a child process.

    Attributes:
      function: `"package.module:function"`, called with the payload.
      payload: anything that `json` takes.
      limit: seconds after which the child is killed.
      environment: variables set in the child on top of this process's; None removes one. Jobs of the same
        environment share children.
      group: jobs of different groups do not share a child all the same.
      batch: neighbours of one batch are done by one child, one after the other, which may keep what they share.
    """

    function: str
    payload: Any
    limit: float = 60.0
    environment: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    group: str = ""
    batch: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a job.

    Attributes:
      status: `ok`: the function returned; `failed`: it raised; `aborted`: the child died; `timeout`: it took
        longer than its limit.
      value: what the function returned.
      words: the exception, or the last the child said before it died.
      log: what the child printed during the job.
    """

    job: Job
    status: Literal["ok", "failed", "aborted", "timeout"]
    value: Any = None
    words: str = ""
    log: str = ""
    seconds: float = 0.0


def run_jobs(jobs: Sequence[Job], *, parallel: int | None = None) -> Generator[Outcome, None, None]:
    """Do jobs in child processes and yield each outcome when it is there, in any order.

    A child whose job raised, died or took too long is replaced; the jobs after it are done in a fresh one.
    Leaving the iteration early kills the children.

    Args:
      jobs: what to do.
      parallel: how many children at a time; None is the number of CPUs this process may use, but at most 8.
    """
    pool = _Pool(jobs)
    count = min(parallel or min(_cpus(), 8), len(jobs))
    threads = [threading.Thread(target=pool.work, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    try:
        for _ in jobs:
            found = pool.found.get()
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        pool.stop()
        for thread in threads:
            thread.join()


def run_job(job: Job) -> Outcome:
    """Do one job in a child process of its own."""
    (outcome,) = run_jobs([job])
    return outcome


def _cpus() -> int:
    counted: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return len(counted(0)) if counted else os.cpu_count() or 1


class _Pool:
    """Jobs that are still to do, and the children that do them."""

    def __init__(self, jobs: Sequence[Job]):
        self.found: queue.Queue[Outcome | BaseException] = queue.Queue()
        numbered = groupby(enumerate(jobs), lambda each: each[1].batch or each[0])
        self._pending = [[job for _, job in batch] for _, batch in numbered]
        self._children: set[_Child] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def work(self) -> None:
        """Do jobs until none is left: the loop of one thread, which has one child at a time."""
        child: _Child | None = None
        try:
            while batch := self._take(child):
                for job in batch:
                    if child is None or not child.takes(job):
                        self._drop(child)
                        child = self._start(job)
                    outcome = child.do(job)
                    if outcome.status != "ok":
                        self._drop(child)
                        child = None
                    self.found.put(outcome)
        except BaseException as error:
            self.found.put(error)
        finally:
            self._drop(child)

    def stop(self) -> None:
        """Kill what is running and start nothing more."""
        with self._lock:
            self._stopped = True
            children = list(self._children)
        for child in children:
            child.kill()

    def _take(self, child: _Child | None) -> list[Job]:
        """The next batch, if there is one that this child can do; else the next of all. Empty if none is left."""
        with self._lock:
            if self._stopped or not self._pending:
                return []
            suits = (n for n, batch in enumerate(self._pending) if child is not None and child.takes(batch[0]))
            return self._pending.pop(next(suits, 0))

    def _start(self, job: Job) -> _Child:
        child = _Child(job)
        with self._lock:
            self._children.add(child)
            if self._stopped:
                child.kill()
        return child

    def _drop(self, child: _Child | None) -> None:
        if child is not None:
            child.close()
            with self._lock:
                self._children.discard(child)


class _Child:
    """One child process."""

    def __init__(self, first: Job):
        self._first = first
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self._answers, answers = os.pipe()
        self._buffer = b""
        self._done = 0
        self._process = subprocess.Popen(
            # By its path, so that a child imports what its jobs need only; `-P`: no folder hides a package.
            [sys.executable, "-P", str(_WORKER), str(answers)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            env=_variables(first.environment),
            pass_fds=(answers,),
            start_new_session=True,
        )
        os.close(answers)

    def takes(self, job: Job) -> bool:
        """Whether this child can do a job."""
        same = job.group == self._first.group and job.environment == self._first.environment
        return same and self._done < JOBS_PER_CHILD

    def do(self, job: Job) -> Outcome:
        """Do a job here."""
        start, printed = time.monotonic(), self._log.seek(0, os.SEEK_END)
        limit = job.limit + (STARTUP if self._done == 0 else 0.0)
        self._done += 1
        request = json.dumps({"function": job.function, "payload": job.payload, "limit": limit})
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died: seen below, since it gives no answer
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        line = self._answer(start + limit)
        seconds = time.monotonic() - start
        if line is None:
            self.kill()
            words = f"no answer within {job.limit:g} s; killed."
            return Outcome(job, "timeout", words=words, log=self._printed(printed), seconds=seconds)
        if line == b"":
            code = self._process.wait()
            log = self._printed(printed)
            return Outcome(job, "aborted", words=f"{_death(code)}: {last_words(log)}", log=log, seconds=seconds)
        answer = json.loads(line)
        log = self._printed(printed)
        if "error" in answer:
            return Outcome(job, "failed", words=answer["error"], log=log, seconds=answer["seconds"])
        return Outcome(job, "ok", value=answer["value"], log=log, seconds=answer["seconds"])

    def kill(self) -> None:
        """End the child and what it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """End the child: at once, for it has nothing to do."""
        self.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._answers)
        self._log.close()

    def _answer(self, deadline: float) -> bytes | None:
        """One line; empty if the child died, None if it was too late."""
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            read = os.read(self._answers, 1 << 16)
            if not read:
                return b""
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _printed(self, start: int) -> str:
        self._log.seek(start)
        return self._log.read().decode(errors="replace")


def _variables(environment: Mapping[str, str | None]) -> dict[str, str]:
    variables: dict[str, str | None] = {**os.environ, **environment}
    variables["PYTHONPATH"] = os.pathsep.join(filter(os.path.exists, sys.path))
    return {name: value for name, value in variables.items() if value is not None}


def _death(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


_FATAL = re.compile(r"^(F\d{4} |LLVM ERROR|.*(CHECK failure|Check fail|terminate called|Assertion .* failed))")
_NOISE = re.compile(
    r"^(\s*@|\s*0x|\*\*\*|PC: |[IWE]\d{4} |=== Source|third_party/|\)$|https?://symbolize|Fatal Python error"
    r"|Extension modules|  File )"
)


def last_words(log: str, lines: int = 12) -> str:
    """What a process said when it died: from its fatal message on, each line once, without times and stack frames."""
    said = [line.rstrip()[:400] for line in log.splitlines() if line.strip()]
    fatal = next((n for n, line in enumerate(said) if _FATAL.match(line)), None)
    if fatal is None:
        kept = [line for line in said if not _NOISE.match(line)][-lines:]
    else:
        kept = [said[fatal], *(line for line in said[fatal + 1 :] if not _NOISE.match(line))]
    words = dict.fromkeys(re.sub(r"^F\d{4} [\d:.]+ +\d+ ", "", line) for line in kept)
    return "\n".join(list(words)[:lines]) or "it said nothing."

"""The child of `gpu.py`: runs its list on the device, and says what came of it, line by line.

A kernel that hangs or aborts takes its process along, so the parent reads what is said here, and starts another child
for the rest. Messages are JSON, one a line: `facts`, `tasks`, `begin`, `row`, `end`, `finished`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import math
import os
import platform
import sys
import time
import tomllib
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from gpu_child import LOST
from gpu_lists import numerics, speed
from gpu_numerics import Row, check, moving
from gpu_problems import Direction, Problem
from gpu_speed import DeviceLostError, Race, floor, race, said_by, usable

from opmux import registry

ROOT = Path(__file__).parents[1]
PACKAGES = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12",
    "nvidia-cublas", "nvidia-cuda-nvcc", "nvidia-nvjitlink", "numpy", "opmux",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """A line of the list: a call to check or one direction of a call to time."""

    kind: str
    problem: Problem
    direction: Direction | None = None

    @property
    def name(self) -> str:
        return " ".join(filter(None, [self.kind, self.problem.op, self.direction, self.problem.title]))


def tasks(small: bool, only: str, tier: int = 2) -> list[Task]:
    """The list, the most important first.

    Args:
      small: in sizes for a simulator.
      only: patterns, of words; what has all words of one of them is kept.
      tier: the highest that is kept.
    """
    found = [Task("numerics", problem) for problem in numerics(small)]
    found += [Task("speed", problem, way) for problem in speed(small) for way in problem.directions]
    patterns = [pattern.split() for pattern in only.split(",") if pattern.strip()]
    kept = [
        task for task in found
        if task.problem.tier <= tier
        and (not patterns or any(all(word in task.name.split() for word in words) for words in patterns))
    ]  # fmt: skip
    return sorted(kept, key=lambda task: (task.problem.tier, task.kind == "speed"))


class Voice:
    """Speaks to the parent."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __call__(self, what: str, **values: Any) -> None:
        self._stream.write(json.dumps({"say": what, **_plain(values)}) + "\n")
        self._stream.flush()


def _plain(value: Any) -> Any:
    """JSON has no infinities."""
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def facts(simulate: bool) -> Row:
    """What was measured on what."""
    device = jax.devices()[0]
    versions: dict[str, str] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device_kind": device.device_kind, "platform": device.platform, "python": platform.python_version(),
        "platform_version": str(getattr(device.client, "platform_version", "")).strip(), "versions": versions,
        "opmux": str(getattr(registry, "__file__", "")), "simulated": simulate, "dispatch_floor_s": floor(),
    }  # fmt: skip


def register_plugins() -> None:
    """Registers opmux's own backends where it is a folder of sources: entry points belong to what is installed."""
    there = registry.backends()
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["opmux"]
    for name, module in declared.items():
        if name not in there:
            registry.register(importlib.import_module(module), name)


class Worker:
    """Works the list off."""

    def __init__(self, order: dict[str, Any], say: Voice) -> None:
        self.order, self.say = order, say
        self.simulate: bool = order["simulate"]
        self.without = {(task, part) for task, part in order["without"]}
        self.taken: dict[str, list[float]] = {}

    def run(self) -> None:
        for task in tasks(self.simulate, self.order["only"], self.order["tier"]):
            if task.name in self.order["done"]:
                continue
            durations = self.taken.setdefault(task.kind, [])
            start, expected = time.time(), sum(durations) / len(durations) if durations else 0.0
            self.say("begin", task=task.name, part="")
            if start + expected > self.order["deadline"]:
                self.row(task, "", {"status": "skipped", "detail": "no time left"})
            else:
                self.attempt(task)
                durations.append(time.time() - start)
            self.say("end", task=task.name)
        self.say("finished")

    def attempt(self, task: Task) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                arrays = task.problem.arrays()
                self.check(task, arrays) if task.direction is None else self.race(task, task.direction, arrays)
        except DeviceLostError:
            raise
        except Exception as error:
            traceback.print_exc()
            self.row(task, "", {"status": "failed", "detail": said_by(error)})
            usable()

    def check(self, task: Task, arrays: dict[str, jax.Array]) -> None:
        for way in task.problem.directions:
            if (task.name, way) in self.without or (way == "backward" and not moving(task.problem, arrays)):
                continue
            self.say("begin", task=task.name, part=way)
            start = time.perf_counter()
            try:
                row = check(task.problem, way, arrays, twice=not self.simulate)
            except Exception as error:
                traceback.print_exc()
                self.row(task, way, {"status": "failed", "detail": said_by(error)})
                usable()
                continue
            self.row(task, way, {**row, "seconds": time.perf_counter() - start})

    def race(self, task: Task, direction: Direction, arrays: dict[str, jax.Array]) -> None:
        without = frozenset(part for name, part in self.without if name == task.name)
        if "timing" in without:
            return
        configs = self.order["configs"].get(task.problem.op, {})
        race(
            Race(task.problem, direction, arrays, configs), lambda part, row: self.row(task, part, row),
            lambda part: self.say("begin", task=task.name, part=part), without=without, rounds=self.order["rounds"],
            measured=not self.simulate,
        )  # fmt: skip

    def row(self, task: Task, part: str, row: Row) -> None:
        """Says what came of one part of a task."""
        self.say("row", row={"task": task.name, "kind": task.kind, "op": task.problem.op, "part": part, **row})


def main(arguments: list[str]) -> int:
    order: dict[str, Any] = json.loads(arguments[0])
    with os.fdopen(order["pipe"], "w") as stream:
        say = Voice(stream)
        register_plugins()
        if order["list"]:
            say("tasks", tasks=[task.name for task in tasks(order["simulate"], order["only"], order["tier"])])
            say("finished")
            return 0
        say("facts", facts=facts(order["simulate"]))
        try:
            Worker(order, say).run()
        except DeviceLostError:
            traceback.print_exc()
            return LOST
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""One certification: what to do for some backends, ops and targets, doing it, and comparing it with the baseline."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from opmux import registry
from opmux.certify import cache, compiling, simulate, targets
from opmux.certify.baseline import COMMITTED, Baseline
from opmux.certify.job import CompileJob, Workload
from opmux.certify.results import CompileResult, Report, SimulateResult
from opmux.certify.workloads import Level, allowed_spills, unestimated, workloads
from opmux.core.devices import device
from opmux.core.errors import SettingError, UnknownBackendError, UnknownDeviceError, UnknownOpError
from opmux.core.op import Op
from opmux.core.request import ArraySpec

Progress = Callable[[int, int, str], None]
"""Called with how many of how many are done, and what was done last."""

Part = Literal["simulate", "compile"]
PARTS: tuple[Part, ...] = ("simulate", "compile")


def certify(
    backends: Iterable[str] | None = None,
    ops: Iterable[str] | None = None,
    targets: Iterable[str] | None = None,
    *,
    level: Level = "quick",
    parts: Iterable[Part] = PARTS,
    baseline: str | Path = COMMITTED,
    update_baseline: bool = False,
    dump: str | Path | None = None,
    cached: bool = True,
    parallel: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Proves implementations without their devices: simulated, compiled, measured, compared with a baseline.

    Everything runs in child processes: a kernel that hangs, or a compiler that aborts, is a failure in the report.

    Args:
      backends: names of backends; by default those that have a simulator.
      ops: names of ops; all that a backend implements by default. Backwards are certified with their ops.
      targets: names of devices to compile for; by default every known one that a backend is for, at level `quick`
        without those whose code is that of another. The compiler's cycle estimates, which take longer than to
        compile, are asked for where targets are named; by default for `tpu-v6e` only.
      level: `quick` takes a few cases and workloads of each op; `full` takes all.
      parts: `simulate`, `compile`, or both.
      baseline: file of figures to compare with.
      update_baseline: write what is found to that file, in place of comparing.
      dump: folder to keep the compilers' texts in; nothing is taken from the cache then.
      cached: results of compilers may come from, and go to, the cache folder.
      parallel: child processes at a time; one for each CPU by default.
      progress: called after every result.

    Raises:
      UnknownBackendError, UnknownOpError, UnknownDeviceError: a name means nothing.
      SettingError: nothing is left to do, or the baseline cannot be read.
      MissingCompilerError: nothing of what was asked for can be done without a compiler that is not installed.
    """
    chosen = _backends(backends)
    names = _ops(ops)
    kept = Baseline.read(Path(baseline))
    runs, skipped = simulate.plan(chosen, names, level) if "simulate" in parts else ([], [])
    programs, lacking = _programs(chosen, names, targets, level, dump) if "compile" in parts else ([], [])
    if not runs and not programs:
        if lacking:
            raise compiling.MissingCompilerError("\n".join(lacking))
        raise SettingError(f"nothing to do for {', '.join(chosen) or 'no backend'} and {', '.join(names)}")

    count = _Counter(len(runs) + len(programs), progress)
    simulated = [count(found) for found in simulate.simulate(runs, parallel=parallel)] if runs else []
    compiled = (
        [count(found) for found in compiling.compile_jobs(programs, parallel=parallel, cached=cached)]
        if programs
        else []
    )
    versions = _versions()
    report = Report(
        versions=versions,
        level=level,
        compiled=tuple(sorted(compiled, key=lambda found: found.key)),
        simulated=tuple(sorted(simulated, key=lambda found: found.key)),
        skipped=(*skipped, *lacking),
    )
    if update_baseline:
        kept.update(report.compiled, versions)
        kept.write(Path(baseline))
        return report
    unknown = [
        f"comparing with the baseline: it has no figures of {key}; --update-baseline adds them"
        for key in kept.unknown(report.compiled, versions)
    ]
    return report.model_copy(
        update={
            "regressions": tuple(kept.regressions(report.compiled, versions)),
            "skipped": (*report.skipped, *unknown),
        }
    )


def compile(
    op: str,
    *args: Any,
    target: str | Iterable[str],
    backend: str | None = None,
    config: dict[str, Any] | None = None,
    dump: str | Path | None = None,
    cached: bool = True,
    **kwargs: Any,
) -> list[CompileResult]:
    """Compiles one call of an op for devices that may be absent, and measures it.

    Args:
      op: name of the op.
      *args: its arguments, as in a call; `jax.ShapeDtypeStruct` stands for arrays.
      target: names of devices.
      backend: name of a backend; by default, the one that would be chosen on each device.
      config: fields that override the kernel's default config.
      dump: folder to keep the compilers' texts in.
      cached: results may come from, and go to, the cache folder.
      **kwargs: further arguments of the op.

    Returns:
      One result for each target, in their order.

    Raises:
      OpmuxError: a name means nothing, or the op does not take the arguments.
      MissingCompilerError: the compiler of a target is not installed.
    """
    found = registry.get(op).op
    workload = _workload(found, args, kwargs)
    names = _target_names([target] if isinstance(target, str) else target)
    jobs: list[CompileJob] = []
    refused: dict[str, CompileResult] = {}
    for name in names:
        with registry.use(simulate="never"):
            decision = registry.get(op, backend=backend, device=name).explain(*args, **kwargs)
        if not decision.backend:
            refused[name] = CompileResult(
                backend=backend or "", op=op, workload=workload.name, target=name, status="refused",
                words="; ".join(
                    f"{each.backend}: {reason.detail}"
                    for each in decision.candidates if backend in (None, each.backend) for reason in each.reasons
                ),
            )  # fmt: skip
            continue
        jobs.append(
            CompileJob(
                backend=decision.backend, op=op, workload=workload, target=name, config=config or {},
                dump=str(dump or ""),
            )
        )  # fmt: skip
    by_target = {result.target: result for result in compiling.compile_jobs(jobs, cached=cached)} if jobs else {}
    return [{**refused, **by_target}[name] for name in names]


def _backends(wanted: Iterable[str] | None) -> list[str]:
    known = registry.backends()
    if wanted is None:
        return [name for name, info in known.items() if info.simulator]
    names = list(dict.fromkeys(wanted))
    for name in names:
        if name not in known:
            raise UnknownBackendError(name, known)
    return names


def _ops(wanted: Iterable[str] | None) -> list[str]:
    known = registry.ops()
    names = list(known) if wanted is None else list(dict.fromkeys(name.removesuffix("_vjp") for name in wanted))
    for name in names:
        if name not in known:
            raise UnknownOpError(name, known)
    return names


def _target_names(wanted: Iterable[str] | None) -> list[str]:
    if wanted is None:
        return list(targets.TARGETS)
    return list(dict.fromkeys(targets.target(_declared(name)).name for name in wanted))


def _declared(name: str) -> str:
    """The name of a device that may be spelt otherwise, such as `v6e`."""
    try:
        return device(name).name
    except UnknownDeviceError:
        return name


def _programs(
    backends: Sequence[str], ops: Sequence[str], wanted: Iterable[str] | None, level: Level, dump: str | Path | None
) -> tuple[list[CompileJob], list[str]]:
    """What is to be compiled, and what cannot be."""
    known, names = registry.backends(), _target_names(wanted)
    if wanted is None and level == "quick":
        names = [name for name in names if targets.target(name).quick]
    thorough = {name for name in names if targets.target(name).main or wanted is not None}
    jobs: list[CompileJob] = []
    for implementation in registry.implementations():
        op = implementation.op.removesuffix("_vjp")
        if implementation.backend not in backends or op not in ops:
            continue
        platforms = known[implementation.backend].platforms
        jobs += [
            CompileJob(
                backend=implementation.backend, op=implementation.op, target=name, dump=str(dump or ""),
                workload=workload if name in thorough else unestimated(workload),
            )
            for workload in workloads(registry.ops()[op], level, backward=op != implementation.op)
            for name in names
            if not platforms or targets.target(name).platform in platforms
            if name in thorough or not workload.variant
        ]  # fmt: skip
    lacking = {name: compiling.missing(name) for name in dict.fromkeys(job.target for job in jobs)}
    return [job for job in jobs if not lacking[job.target]], _said(lacking)


def _said(lacking: Mapping[str, str]) -> list[str]:
    """What is missing, once for all targets that lack the same."""
    found: dict[str, list[str]] = {}
    for name, words in lacking.items():
        if words:
            found.setdefault(words.removeprefix(f"compiling for {name} "), []).append(name)
    return [f"compiling for {', '.join(names)} {words}" for words, names in found.items()]


def _workload(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Workload:
    """A call as a workload: arrays by shape and dtype, except where their values decide shapes."""
    given = op.bind(args, kwargs).arguments
    arrays: dict[str, str | tuple[int, ...]] = {}
    params: dict[str, Any] = {}
    for name, value in given.items():
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            params[name] = value
        elif op.prepare is not None and name in op.value_checked and not isinstance(value, jax.ShapeDtypeStruct):
            arrays[name] = tuple(np.asarray(value).tolist())
        else:
            arrays[name] = str(ArraySpec.of(value))
    return Workload(name="call", args=arrays, params=params, allowed_spills=allowed_spills(op.name))


class _Counter:
    """Reports progress as results pass."""

    def __init__(self, total: int, progress: Progress | None):
        self._done, self._total, self._progress = 0, total, progress

    def __call__(self, found: Any) -> Any:
        self._done += 1
        if self._progress is not None:
            result: SimulateResult | CompileResult = found
            self._progress(self._done, self._total, f"{result.status:<8} {result.key}")
        return found


def _versions() -> dict[str, str]:
    return {"opmux": metadata.version("opmux"), "python": platform.python_version(), **cache.versions()}

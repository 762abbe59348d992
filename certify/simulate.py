"""Every implementation on every case, in a simulator of its device: numbers against the oracle, races, wild reads.

Runs share child processes, one kernel after the other. A kernel that waits for ever ends its child, when its limit
is over, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from pydantic import BaseModel, ConfigDict

from opmux import registry
from opmux.certify.block_cases import block_cases
from opmux.certify.children import Job, Outcome, run_jobs
from opmux.certify.results import SimulateResult
from opmux.certify.workloads import Level
from opmux.core.cases.case import Case
from opmux.core.op import Op
from opmux.core.simulation import SimulatorOptions
from opmux.testing import find_oracle

LIMIT = 240.0
"""Seconds for one run; a kernel that waits for a signal that was lost waits for ever."""

_ENVIRONMENT: dict[str, str | None] = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_X64": None,
    "OPMUX_BACKEND": None,
    "OPMUX_SIMULATE": None,
    "XLA_FLAGS": None,
}


# Copies that happen late show what is read too early, and copies that happen early show what is overwritten too
# early; the seed orders the grid points of parallel axes, and two cores take them by turns.
def _late_and_early(seed: int | None, cores: int) -> tuple[SimulatorOptions, ...]:
    return tuple(SimulatorOptions(dma=dma, seed=seed, cores=cores) for dma in ("on_wait", "eager"))


MODES: dict[str, tuple[SimulatorOptions, ...]] = {
    "tpu": _late_and_early(seed=0, cores=2),
    "cuda": (SimulatorOptions(),),
}
"""Simulator options of every run, by platform."""
MORE_MODES: dict[str, tuple[SimulatorOptions, ...]] = {
    "tpu": (*_late_and_early(seed=None, cores=1), *_late_and_early(seed=1, cores=2)),
}
"""Options that cases of several blocks are run with in addition, at level `full`."""


class SimulateJob(BaseModel):
    """One implementation to run on one case.

    Attributes:
      backend: name of the backend.
      op: name of the op, or of its backward (`attention_vjp`), whose gradients are compared with differences of the
        oracle.
      case: name of a case of the op.
      options: options of the simulator.
      platform: JAX platform of the backend's device; says which options matter.
      small_blocks: blocks are made as small as the kernel's config allows.
      config: further fields that override the kernel's default config.
      plugins: modules to register as plugins in the child, besides those of entry points.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str
    op: str
    case: str
    options: SimulatorOptions = SimulatorOptions()
    platform: str = ""
    small_blocks: bool = False
    config: dict[str, object] = {}
    plugins: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        """The options that matter, as text."""
        found: list[str] = []
        if self.platform == "tpu":
            seed = [] if self.options.seed is None else [f"seed={self.options.seed}"]
            found += [f"dma={self.options.dma}", *seed, f"cores={self.options.cores}"]
        if self.platform == "cuda":
            found += [f"tma_threads={self.options.tma_threads}"]
        return " ".join([*found, *(["blocks=small"] if self.small_blocks else [])])

    @property
    def key(self) -> str:
        """As `SimulateResult.key`."""
        return f"{self.backend}/{self.op}/{self.case}/{self.mode}"

    @property
    def batch(self) -> str:
        """The same for jobs that one program does: whether it copies late or early is asked when it runs."""
        return self.model_copy(update={"options": replace(self.options, dma="on_wait")}).key


def plan(backends: Iterable[str], ops: Iterable[str], level: Level) -> tuple[list[SimulateJob], list[str]]:
    """What is to be run for some backends and ops, and what cannot be: ops that have no oracle, and long cases.

    Level `quick` runs the cases of several blocks, and of the forward those that stand for transforms; `full` runs
    every case but the long ones, and those of several blocks under more options.

    Args:
      backends: names of backends; those without a simulator have nothing to run.
      ops: names of forward ops.
      level: how much.
    """
    known, wanted = registry.backends(), set(ops)
    jobs: list[SimulateJob] = []
    skipped: list[str] = []
    for backend in backends:
        if not known[backend].simulator:
            continue
        platform = next(iter(known[backend].platforms), "")
        for implementation in registry.implementations():
            name = implementation.op.removesuffix("_vjp")
            if implementation.backend != backend or name not in wanted:
                continue
            op = registry.ops()[name]
            try:
                find_oracle(name)
            except LookupError:
                skipped.append(f"simulating {backend} {implementation.op}: opmux has no oracle of the op {name!r}")
                continue
            jobs += _jobs(backend, op, implementation.op, platform, level)
            skipped += [
                f"simulating {backend} {implementation.op} {case.name}: thousands of steps"
                for case in _cases(op, implementation.op, level)
                if case.long
            ]
    return jobs, skipped


def _jobs(backend: str, op: Op, implemented: str, platform: str, level: Level) -> Iterator[SimulateJob]:
    modes = MODES.get(platform, (SimulatorOptions(),))
    more = MORE_MODES.get(platform, ()) if level == "full" else ()
    backward = implemented != op.name

    def job(case: Case, options: SimulatorOptions, small: bool) -> SimulateJob:
        return SimulateJob(
            backend=backend, op=implemented, case=case.name, options=options, platform=platform, small_blocks=small
        )

    for case in block_cases(op.name):
        for options in (*modes, *more):
            yield job(case, options, not backward)
    for case in _cases(op, implemented, level):
        if not case.long:
            yield from (job(case, options, False) for options in modes)


def _cases(op: Op, implemented: str, level: Level) -> list[Case]:
    """The cases of an op that are run on one of its implementations, besides those of several blocks."""
    backward = implemented != op.name
    if level == "full":
        return [case for case in op.cases() if case.grad or not backward]
    return [case for case in op.cases() if case.transforms and not backward]


def simulate(
    jobs: Sequence[SimulateJob], *, parallel: int | None = None, limit: float = LIMIT
) -> Iterator[SimulateResult]:
    """Runs jobs in child processes and yields each result when it is there, in any order.

    Args:
      jobs: what to run.
      parallel: child processes at a time; None is one for each CPU.
      limit: seconds for one run.
    """
    found = [
        Job(
            "opmux.certify.simulated:simulate_job", job.model_dump(mode="json"), limit, _ENVIRONMENT, job.backend,
            batch=job.batch,
        )
        for job in jobs
    ]  # fmt: skip
    by_payload = {id(job.payload): own for job, own in zip(found, jobs, strict=True)}
    for outcome in run_jobs(found, parallel=parallel):
        yield _result(by_payload[id(outcome.job.payload)], outcome)


def _result(job: SimulateJob, outcome: Outcome) -> SimulateResult:
    where = {"backend": job.backend, "op": job.op, "case": job.case, "mode": job.mode}
    if outcome.status != "ok":
        kind = "hang" if outcome.status == "timeout" else "error"
        words = outcome.words
        if kind == "hang":
            words = f"no end after {outcome.job.limit:g} seconds: it waits for a signal that nothing sends, or is slow"
        found = {"status": outcome.status, "kind": kind, "words": words, "seconds": outcome.seconds}
        return SimulateResult.model_validate(where | found)
    result = SimulateResult.model_validate(where | outcome.value)
    if result.words.endswith(_PRINTED):
        words = result.words.removesuffix(_PRINTED)
        return result.model_copy(update={"words": "\n".join([words, *_race(outcome.log)])})
    return result


_PRINTED = "; the simulator printed where"


def _race(log: str) -> list[str]:
    """The two accesses of the first race that a simulator printed."""
    _, _, rest = log.partition("RACE DETECTED\n")
    lines = [line.rstrip()[:400] for line in rest.partition("\n\n")[0].splitlines()]
    return [line for line in lines if not line.lstrip().startswith("clock:")]

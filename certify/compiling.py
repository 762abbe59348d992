"""Compiles jobs in child processes, as many at a time as helps, and keeps what they find."""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence

from opmux.certify import cache, compile_gpu, compile_tpu, profile, targets
from opmux.certify.children import Job, Outcome, run_jobs
from opmux.certify.job import CompileJob
from opmux.certify.results import CompileResult, KernelMeasures
from opmux.certify.roofline import with_estimate
from opmux.core.errors import OpmuxError

INSTALL = "pip install 'opmux[certify]'"
COMPILE_LIMIT = 180.0
"""Seconds for one program."""
PROFILE_LIMIT = 120.0
"""Seconds for the cycle estimates of one program; the estimator steps through the grid."""

_COMMON: dict[str, str | None] = {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": None,  # what comes from there is not dumped
    "JAX_ENABLE_X64": None,
    "OPMUX_BACKEND": None,
    "OPMUX_SIMULATE": None,
    "XLA_FLAGS": None,
}


class MissingCompilerError(OpmuxError):
    """No compiler for a target is installed; says what to install."""


def missing(target: str) -> str:
    """What is missing to compile for a target, in one line; empty if nothing is.

    Raises:
      UnknownDeviceError: no compiler here compiles for it.
    """
    found = targets.target(target)
    if found.platform == "tpu":
        lacks = [] if _installed("libtpu") else ["libtpu"]
    else:
        plugin = any(_installed(f"jax_plugins.xla_cuda{version}") for version in (13, 12))
        lacks = [] if plugin else ["JAX's CUDA plugin"]
        lacks += [] if _tool("ptxas") else ["ptxas"]
        lacks += [] if _installed("absl") else ["absl-py"]
    lacks += [] if _installed("flatbuffers") else ["flatbuffers"]  # whole functions are serialized with it
    return f"compiling for {target} needs {', '.join(lacks)}: {INSTALL}" if lacks else ""


def compile_jobs(
    jobs: Sequence[CompileJob], *, parallel: int | None = None, cached: bool = True
) -> Iterator[CompileResult]:
    """Compiles jobs for absent devices and yields each result when it is there, in any order.

    Args:
      jobs: what to compile.
      parallel: child processes at a time; None is one for each CPU.
      cached: results may come from, and go to, the cache folder.

    Raises:
      UnknownDeviceError: a job names a target that no compiler here compiles for.
      MissingCompilerError: the compiler of a target is not installed.
    """
    for target in dict.fromkeys(job.target for job in jobs):
        if lacks := missing(target):
            raise MissingCompilerError(lacks)
    return _compile_jobs(jobs, parallel, cached)


def _compile_jobs(jobs: Sequence[CompileJob], parallel: int | None, cached: bool) -> Iterator[CompileResult]:
    with scratch_folder() as scratch:
        unprofiled: dict[int, Outcome] = {}
        for outcome in run_jobs([_job(n, job, scratch, cached) for n, job in enumerate(jobs)], parallel=parallel):
            number = outcome.job.payload["number"]
            result = _result(jobs[number], outcome)
            if result.kernels and not result.cached and _has_profile(jobs[number]):
                unprofiled[number] = outcome
            else:
                yield _finished(result, outcome, cached)
        again = [_profile_job(number, jobs[number], scratch) for number in unprofiled]
        for profiled in run_jobs(again, parallel=parallel):
            number = profiled.job.payload["number"]
            outcome = unprofiled[number]
            result = _with_cycles(_result(jobs[number], outcome), profiled)
            # A slow machine is no property of the kernel.
            yield _finished(result, outcome, cached and profiled.status != "timeout")


def _finished(result: CompileResult, outcome: Outcome, keep: bool) -> CompileResult:
    if not result.kernels or result.cached:
        return result
    result = with_estimate(result, outcome.value["dtype"])
    if keep and (key := outcome.value["key"]):
        cache.save(key, result)
    return result


def _job(number: int, job: CompileJob, scratch: str, cached: bool) -> Job:
    payload = {"number": number, "job": job.model_dump(mode="json"), "scratch": scratch, "cached": cached}
    # A GPU's compiler keeps what it has compiled for another of the same code.
    on_gpu = targets.target(job.target).platform == "cuda"
    return Job(
        "opmux.certify.attempt:compile_job", payload, COMPILE_LIMIT, environment(job.target), group(job.target),
        batch=f"{job.backend}/{job.op}/{job.workload.name}/{group(job.target)}" if on_gpu else "",
    )  # fmt: skip


def environment(target: str) -> dict[str, str | None]:
    """Variables of a child that compiles for a target."""
    own = compile_tpu.ENVIRONMENT if targets.target(target).platform == "tpu" else compile_gpu.environment()
    return {**_COMMON, **own}


def group(target: str) -> str:
    """Targets of one group can be compiled for by one child."""
    return str(targets.target(target).device.compute_capability or "tpu")


def _profile_job(number: int, job: CompileJob, scratch: str) -> Job:
    payload = {"number": number, "job": job.model_dump(mode="json"), "scratch": scratch}
    return Job("opmux.certify.profile:profile_job", payload, PROFILE_LIMIT, environment(job.target), "profile")


def _result(job: CompileJob, outcome: Outcome) -> CompileResult:
    if outcome.status == "ok":
        result = CompileResult.model_validate(outcome.value["result"])
        return result if result.status != "failed" else result.model_copy(update={"words": _words(result, outcome)})
    return CompileResult(
        backend=job.backend, op=job.op, workload=job.workload.name, target=job.target, status=outcome.status,
        words=outcome.words, seconds=outcome.seconds,
    )  # fmt: skip


def _words(result: CompileResult, outcome: Outcome) -> str:
    """What a compiler said of a failure, with the errors that it only printed."""
    printed = (error.strip() for error in re.findall(r"\berror: .+", outcome.log))
    return "\n".join([result.words, *list(dict.fromkeys(each for each in printed if each not in result.words))[:4]])


def _has_profile(job: CompileJob) -> bool:
    on_tpu = targets.target(job.target).platform == "tpu"
    return on_tpu and job.target not in profile.IMPOSSIBLE and job.workload.estimate


def _with_cycles(result: CompileResult, profiled: Outcome) -> CompileResult:
    cycles: dict[str, float] = profiled.value if profiled.status == "ok" else {}
    kernels: list[KernelMeasures] = []
    # XLA calls a kernel that has no name after the function around it. One that is alone needs none.
    alone = next(iter(cycles.values())) if len(cycles) == len(result.kernels) == 1 else 0.0
    for kernel in result.kernels:
        if found := cycles.get(kernel.kernel, alone):
            kernel = kernel.model_copy(update={"figures": {**kernel.figures, "estimated_cycles": found}})
        elif profiled.status != "ok":
            said = f"no cycle estimate: {profiled.words}"
            kernel = kernel.model_copy(update={"warnings": (*kernel.warnings, said)})
        kernels.append(kernel)
    seconds = result.seconds + profiled.seconds
    return result.model_copy(update={"kernels": tuple(kernels), "seconds": seconds})


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _tool(name: str) -> bool:
    return any((folder / name).is_file() for folder in compile_gpu.TOOLS) or shutil.which(name) is not None


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for what compilers dump, gone after the block."""
    return tempfile.TemporaryDirectory(prefix="opmux-certify-")

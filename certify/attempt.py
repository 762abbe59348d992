"""The child's side of compiling: one job, lowered, compiled and measured. Whatever a compiler says is a result."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from opmux.certify import cache, compile_gpu, compile_tpu, program, targets
from opmux.certify.job import CompileJob
from opmux.certify.kernels import pallas_calls
from opmux.certify.results import CompileResult, KernelMeasures
from opmux.certify.targets import Target

COMPILERS = {"tpu": compile_tpu, "cuda": compile_gpu}


def compile_job(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a job.

    Args:
      payload: `job`, a `CompileJob` as JSON; `scratch`, a folder for dumps; `cached`, whether results may come from
        the cache.

    Returns:
      `result`, a `CompileResult` as JSON, without its estimate unless it comes from the cache; `key`, what the cache
      files it under; `dtype`, which decides the peak rate. Without a key, the result is not to be kept.
    """
    job, start = CompileJob.model_validate(payload["job"]), time.perf_counter()
    record: dict[str, Any] = {
        "backend": job.backend, "op": job.op, "workload": job.workload.name, "target": job.target
    }  # fmt: skip
    key = dtype = ""
    try:
        found = program.build(job)
        dtype = program.format_of(found.request)
        record |= {"config": found.config.model_dump(mode="json"), "flops": found.flops}
        place = Place(targets.target(job.target), Path(payload["scratch"]), texts=bool(job.dump))
        lowered = place.lower(found.function, program.placed(found.arguments, place.sharding))
        allowed = targets.target(job.target).entry(job.workload.allowed_spills)
        flags = {"estimate": str(job.workload.estimate), "flops": str(found.flops), "spills": str(allowed)}
        key = cache.key(lowered.text, job.target, flags)
        if payload["cached"] and not job.dump and (kept := cache.load(key)) is not None:
            seconds = time.perf_counter() - start
            return {
                "result": kept.model_copy(update={**record, "cached": True, "seconds": seconds}).model_dump(mode="json")
            }
        compiled = place.compile(lowered, Path(job.dump) / job.key if job.dump else None)
        hbm = compiled.memory["arguments"] + compiled.memory["results"] + 2 * compiled.memory["temporaries"]
        record |= {"kernels": compiled.kernels, "hbm_bytes": hbm, "lowered": lowered.custom_calls}
        spilled = _spilled(compiled.kernels, allowed)
        result = CompileResult(**record, status="failed" if spilled else "ok", words=spilled)
    except program.RefusedError as refusal:
        result = CompileResult(**record, status="refused", words=str(refusal))
    except Exception as error:
        result = CompileResult(**record, status="failed", words=words(error))
    result = result.model_copy(update={"seconds": time.perf_counter() - start})
    return {"result": result.model_dump(mode="json"), "key": key if result.status == "ok" else "", "dtype": dtype}


def compile_exported(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Compiles a whole function that `jax.export` serialized.

    Args:
      payload: `exported` in base64, `target`, `scratch`, `dump`, a folder or empty, and `allowed_spills`.

    Returns:
      `status`, `words`, `kernels`, `memory`, `cost` and `custom_calls`.
    """
    try:
        exported = jax.export.deserialize(bytearray(base64.b64decode(payload["exported"])))
        place = Place(targets.target(payload["target"]), Path(payload["scratch"]), texts=bool(payload["dump"]))
        avals = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place.sharding) for a in exported.in_avals]
        args, kwargs = jax.tree.unflatten(exported.in_tree, avals)
        lowered = place.lower(exported.call, *args, **kwargs)
        compiled = place.compile(lowered, Path(payload["dump"]) if payload["dump"] else None)
    except Exception as error:
        return {"status": "failed", "words": words(error)}
    spilled = _spilled(compiled.kernels, payload["allowed_spills"])
    return {
        "status": "failed" if spilled else "ok",
        "words": spilled,
        "kernels": [each.model_dump(mode="json") for each in compiled.kernels],
        "memory": compiled.memory,
        "cost": compiled.cost,
        "custom_calls": lowered.custom_calls,
    }


def words(error: Exception, lines: int = 12) -> str:
    """What an exception says, without the dumps of code that compilers put into it and after it."""
    kept = [_shortened(line.rstrip()) for line in str(error).splitlines() if line.strip()]
    kept = [line for line in kept if not re.match(r"\s*(For simplicity, JAX|-{10,})", line)]
    return "\n".join([f"{type(error).__name__}: {kept[0] if kept else ''}", *kept[1:lines]])


def _shortened(line: str, width: int = 500) -> str:
    # The figures are at the end, after the text of the operation.
    return line if len(line) <= width else f"{line[: width // 2]} ... {line[-width // 2 :]}"


def _spilled(kernels: tuple[KernelMeasures, ...], allowed: int) -> str:
    """Names every spill; empty if there is none that counts."""
    said: list[str] = []
    for kernel in kernels:
        found = {name: int(kernel.figures.get(name, 0)) for name in _SPILLS}
        if sum(found.values()) > allowed:
            counts = ", ".join(f"{count} {_SPILLS[name]}" for name, count in found.items() if count)
            said.append(f"kernel {kernel.kernel} spills registers: {counts}")
    return "; ".join(said)


_SPILLS = {
    "spills": "vector stores to spill slots", "fills": "vector loads from spill slots",
    "spill_store_bytes": "bytes stored a thread", "spill_load_bytes": "bytes loaded a thread",
    "LDL": "loads from local memory", "STL": "stores to local memory",
    "fixed_spill_bytes": "bytes stored and loaded a thread where setmaxnreg is ignored",
}  # fmt: skip


class Place:
    """One absent device of a target, to lower and compile for; `texts`: some will be kept."""

    def __init__(self, target: Target, scratch: Path, *, texts: bool = False):
        self._target = target
        self._compiler = COMPILERS[target.platform]
        self._compiler.start(scratch, texts=texts)
        devices = self._compiler.topology(target).devices
        self._mesh = Mesh(np.array(devices[:1]), ("device",))
        self.sharding = NamedSharding(self._mesh, PartitionSpec())

    def lower(self, function: Any, *args: Any, **kwargs: Any) -> Lowered:
        """Traces and lowers a function on abstract arguments."""
        # Kernels ask the mesh what device they are traced for.
        with jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh):
            traced = jax.jit(function).trace(*args, **kwargs)
            return Lowered(traced, traced.lower(lowering_platforms=(self._target.platform,)))

    def compile(self, lowered: Lowered, dump: Path | None) -> Compiled:
        """Compiles and measures; texts are kept in `dump`, if given."""
        self._compiler.clear()
        compiled = lowered.stage.compile()
        calls = list(pallas_calls(lowered.traced.jaxpr))
        kernels = tuple(self._compiler.measure(self._target, lowered.text, compiled.as_text(), calls, dump))
        self._compiler.clear()
        return Compiled(kernels, compiled)


class Lowered:
    """A lowered program."""

    def __init__(self, traced: Any, stage: Any):
        self.traced, self.stage = traced, stage
        self.text: str = stage.as_text()
        self.custom_calls = tuple(dict.fromkeys(re.findall(r"custom_call @(\w+)", self.text)))


class Compiled:
    """A compiled program: its kernels, memory in bytes, and XLA's cost analysis."""

    def __init__(self, kernels: tuple[KernelMeasures, ...], stage: Any):
        self.kernels = kernels
        found = stage.memory_analysis()
        self.memory = {
            "arguments": float(found.argument_size_in_bytes),
            "results": float(found.output_size_in_bytes),
            "temporaries": float(found.temp_size_in_bytes),
            "code": float(found.generated_code_size_in_bytes),
        }
        cost = stage.cost_analysis() or {}
        self.cost = {name: float(cost[name]) for name in ("flops", "bytes accessed", "transcendentals") if name in cost}

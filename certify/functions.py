"""Whole functions compiled for devices that are not there, with the kernels that would be chosen on them."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.export
from pydantic import BaseModel, ConfigDict

from opmux import registry
from opmux.certify import compiling, targets
from opmux.certify.children import Job, run_job
from opmux.certify.kernels import inner_jaxprs
from opmux.certify.results import KernelMeasures
from opmux.certify.workloads import allowed_spills
from opmux.core import compat

LIMIT = 600.0
"""Seconds that a function may take to compile."""


class FunctionResult(BaseModel):
    """What became of a function that was compiled for a target.

    Attributes:
      target: name of the device.
      status: `ok`; `failed`: the compiler refused it, or a kernel spills more than workloads of the function's ops
        may; `aborted`: the compiler died; `timeout`.
      words: what the compiler said.
      backends: by op, the backends that its calls got; backward kernels are under `<op>_vjp`.
      custom_calls: custom calls of the lowered program, such as `tpu_custom_call` or `mosaic_gpu_v2`.
      kernels: measures of its Mosaic kernels; of equal kernels there is one.
      memory: bytes of device memory by use: `arguments`, `results`, `temporaries`, `code`.
      cost: XLA's cost analysis, where it has one: `flops`, `bytes accessed`. It knows nothing of custom calls.
      seconds: how long the compiler took.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    status: Literal["ok", "failed", "aborted", "timeout"]
    words: str = ""
    backends: dict[str, tuple[str, ...]] = {}
    custom_calls: tuple[str, ...] = ()
    kernels: tuple[KernelMeasures, ...] = ()
    memory: dict[str, float] = {}
    cost: dict[str, float] = {}
    seconds: float = 0.0


def compile_function(
    function: Callable[..., Any], *avals: Any, target: str, dump: str | Path | None = None
) -> FunctionResult:
    """Compiles a function of arrays for a device that may be absent.

    The function is traced here, with the kernels that the registry chooses on that device, and compiled in a child
    process.

    Args:
      function: anything that `jax.jit` takes.
      *avals: its arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s. No value is read.
      target: name of the device; see `targets.TARGETS`.
      dump: folder to keep the compiler's texts in.

    Raises:
      UnknownDeviceError: no compiler here compiles for the target.
      MissingCompilerError: the compiler is not installed.
      OpmuxError, and what the function raises: it cannot be traced.
    """
    place = targets.target(target)
    if lacks := compiling.missing(place.name):
        raise compiling.MissingCompilerError(lacks)
    leaves, tree = jax.tree.flatten(avals)
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def flat(*leaves: Any) -> list[Any]:
        # Leaves only: the child need not know the types that the user's pytrees are made of.
        return jax.tree.leaves(function(*jax.tree.unflatten(tree, leaves)))

    device = place.device
    with registry.use(device=place.name), compat.traced_for(device.kind, device.platform, device.cores):
        jitted = jax.jit(flat)
        traced = jitted.trace(*abstract)
        exported = jax.export.export(jitted, platforms=[place.platform], disabled_checks=_UNCHECKED)(*abstract)
    backends = _backends(traced.jaxpr)
    spills = max((place.entry(allowed_spills(op.removesuffix("_vjp"))) for op in backends), default=0)
    with compiling.scratch_folder() as scratch:
        payload = {
            "exported": base64.b64encode(exported.serialize()).decode(), "target": place.name, "scratch": scratch,
            "dump": str(dump or ""), "allowed_spills": spills,
        }  # fmt: skip
        outcome = run_job(
            Job("opmux.certify.attempt:compile_exported", payload, LIMIT, compiling.environment(place.name))
        )
    found: dict[str, Any] = (
        outcome.value if outcome.status == "ok" else {"status": outcome.status, "words": outcome.words}
    )
    return FunctionResult(target=place.name, backends=backends, seconds=outcome.seconds, **found)


_UNCHECKED = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("tpu_custom_call", "mosaic_gpu_v2")]
"""Kernels compiled by the same versions that exported them: what JAX promises for later ones is of no concern."""


def _backends(jaxpr: Any) -> dict[str, tuple[str, ...]]:
    """Backends by op, from the names that dispatch gives to the scopes of kernels."""
    found: dict[str, dict[str, None]] = {}
    for names in _name_stacks(jaxpr):
        for op, backend in re.findall(r"opmux\.(\w+)\[(\w+)\]", names):
            found.setdefault(op, {})[backend] = None
    return {op: tuple(sorted(backends)) for op, backends in sorted(found.items())}


def _name_stacks(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield str(equation.source_info.name_stack)
        for inner in inner_jaxprs(equation):
            yield from _name_stacks(inner)

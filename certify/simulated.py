"""The child's side of simulation: one case, run once in the simulator, against the float64 oracle."""

from __future__ import annotations

import functools
import importlib
import re
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from opmux import registry
from opmux.certify.block_cases import block_cases, small_blocks
from opmux.certify.simulate import SimulateJob
from opmux.core.cases.case import Case
from opmux.core.op import Op
from opmux.testing import Rejected, Subject, assert_close, check_gradients, find_oracle, rtol
from opmux.testing.subject import arguments, longest_axis, run_reference

KINDS = {
    "race": r"race",
    "out-of-bounds": r"out[ -]of[ -]bounds|outside of? .*bounds",
    "barrier": r"barrier|semaphore|phase",
    "uninitialised": r"uninitiali[sz]ed",
}
"""Kinds of failure by what the simulators say, the first that matches."""


def simulate_job(payload: Mapping[str, Any]) -> dict[str, Any]:
    """Runs a `SimulateJob`, given as JSON.

    Returns:
      `status`, `kind`, `words`, `error` and `seconds`, as in `SimulateResult`.
    """
    job, start = SimulateJob.model_validate(payload), time.perf_counter()
    found: dict[str, Any]
    try:
        for module in job.plugins:
            _register(module)
        with registry.use(simulate="always", simulator=job.options):
            found = {"status": "ok", "error": _run(job)}
    except Rejected as refusal:
        found = {"status": "refused", "words": str(refusal)}
    except _WrongError as wrong:
        found = {"status": "failed", "kind": wrong.kind, "words": str(wrong), "error": wrong.error}
    except Exception as error:
        words = said(error)
        found = {"status": "failed", "kind": kind_of(words), "words": words}
    return {**found, "seconds": time.perf_counter() - start}


class _WrongError(AssertionError):
    """The kernel ran, and its results are wrong."""

    def __init__(self, kind: str, words: str, error: float = 0.0):
        super().__init__(words)
        self.kind, self.error = kind, error


def _run(job: SimulateJob) -> float:
    """Largest error in units of the tolerance, to a power of two."""
    op = registry.ops()[job.op.removesuffix("_vjp")]
    case = find_case(op, job.case)
    config = {**(_small_config(job) if job.small_blocks else {}), **job.config}
    handle = registry.get(op.name, backend=job.backend, config=config or None)
    args, kwargs = case.arguments()
    decision = handle.explain(*args, **kwargs)
    if not decision.backend:
        candidate = decision.candidate(job.backend)
        raise Rejected(job.key, () if candidate is None else candidate.reasons)
    if job.op != op.name:
        try:
            check_gradients(Subject.of(op, job.backend), case)
        except AssertionError as error:
            raise _WrongError("numerics", str(error)) from None
        return 0.0
    declared = jax.eval_shape(lambda: run_reference(op, args, kwargs))
    got = [np.asarray(leaf) for leaf in jax.tree.leaves(handle(*args, **kwargs))]
    with np.errstate(all="ignore"):
        want = [np.asarray(leaf) for leaf in jax.tree.leaves(find_oracle(op.name)(*args, **kwargs))]
    length = longest_axis(arguments(op, case)[0])
    errors = [0.0]
    for number, (one, spec, other) in enumerate(zip(got, jax.tree.leaves(declared), want, strict=True)):
        what = f"result {number}"
        if (one.dtype, one.shape) != (spec.dtype, spec.shape):
            raise _WrongError("numerics", f"{what}: {one.dtype}{one.shape}, not {spec.dtype}{spec.shape}")
        errors.append(_compared(one, other, rtol(one.dtype, length) if case.rtol is None else case.rtol, what))
    return max(errors)


def _compared(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> float:
    """The error in units of the tolerance, to the next power of two.

    Raises:
      _WrongError: it is more than one.
    """
    try:
        assert_close(got, want, tolerance, what)
    except AssertionError as error:
        # Memory holds NaN until it is written.
        unwritten = got.dtype.kind not in "biu" and bool((np.isnan(got) & ~np.isnan(want.astype(got.dtype))).any())
        words = f"{error}{'; NaN: memory that nothing was written to was read' if unwritten else ''}"
        scale = next((2.0**n for n in range(1, 40) if _is_close(got, want, tolerance * 2.0**n)), float("inf"))
        raise _WrongError("uninitialised" if unwritten else "numerics", words, min(scale, 2.0**40)) from None
    tighter = (2.0**-n for n in range(1, 8) if not _is_close(got, want, tolerance * 2.0**-n))
    exact = _is_close(got, want, 0.0)
    return 0.0 if exact else 2 * next(tighter, 2.0**-8)


def _is_close(got: np.ndarray, want: np.ndarray, tolerance: float) -> bool:
    try:
        assert_close(got, want, tolerance, "")
    except AssertionError:
        return False
    return True


def find_case(op: Op, name: str) -> Case:
    """The case of this name, of the op's own or of those that fill several blocks."""
    return next(case for case in (*block_cases(op.name), *op.cases()) if case.name == name)


def said(error: Exception, lines: int = 8, width: int = 400) -> str:
    """What an error says, from where it names the kernel on, without the tracebacks that JAX puts around it."""
    text = f"{type(error).__name__}: {error}"
    start = text.rfind("SimulationError: ")
    text = text[start + len("SimulationError: ") :] if start >= 0 else text
    kept = [line.rstrip()[:width] for line in text.splitlines() if line.strip()]
    stop = next((n for n, line in enumerate(kept) if re.match(r"\s*(At:|-{10,}|For simplicity, JAX)", line)), len(kept))
    return "\n".join(kept[: min(stop, lines)])


def kind_of(words: str) -> str:
    """The kind of a failure by what was said of it."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, words, re.IGNORECASE)), "error")


def _small_config(job: SimulateJob) -> dict[str, int]:
    (found,) = [each for each in registry.implementations(job.op) if each.backend == job.backend]
    return small_blocks(found.config)


@functools.cache
def _register(module: str) -> None:
    registry.register(importlib.import_module(module))

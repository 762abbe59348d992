"""Times the contenders of one call on a GPU, side by side."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from gpu_numerics import BACKEND, Arrays, Row, cotangents, deviation, forward, moving, pullback, refusal
from gpu_problems import Direction, Problem
from gpu_rivals import Contender, Variant, rivals

from opmux import registry
from opmux.core import compat, devices
from opmux.core.op import backward_request
from opmux.testing.tolerances import GRADIENT_FACTOR, coarsest, rtol

Thunk = Callable[[], Any]
Say = Callable[[str, Row], None]
BURST = 0.02
"""Seconds that one measurement takes: calls are sent to the GPU without waiting, and the last one is waited for."""


class Race:
    """One direction of one call, and everyone who can run it.

    Attributes:
      contenders: by name; the first is opmux's kernel.
    """

    def __init__(self, problem: Problem, direction: Direction, arrays: Arrays, configs: Mapping[str, Any]) -> None:
        """Takes a call, its arguments, and further configs of opmux's kernel by the words of their rows."""
        self.problem, self.arrays = problem, arrays
        self.direction: Direction = direction
        ours = {BACKEND: None, **{f"{BACKEND} {words}": config for words, config in configs.items()}}
        found = [Contender(name, lambda config=config: self._ours(config)) for name, config in ours.items()]
        found += [*rivals(problem, direction, arrays)]
        found.append(Contender("xla", lambda: [Variant(forward(problem, "xla"))]))
        self.contenders = {contender.name: contender for contender in found}

    def refusal(self, name: str) -> str:
        """Why a contender does not take the call."""
        if not name.startswith(BACKEND):
            return ""
        refused, note = refusal(self.problem, self.direction, self.arrays)
        return refused or (f"no backward kernel: {note}" if note else "")

    def _ours(self, config: Any) -> list[Variant]:
        return [Variant(forward(self.problem, BACKEND, config))]

    def ready(self, contender: Contender) -> tuple[Thunk, str, Any]:
        """The fastest variant of a contender, compiled: a thunk, what is fast about it, and what it returns."""
        best: tuple[float, Thunk, str, Any] | None = None
        trouble: Exception | None = None
        for variant in contender.variants():
            try:
                thunk = self._compiled(variant)
                result = jax.block_until_ready(thunk())
                taken = min(_burst(thunk, 2) for _ in range(2))
            except Exception as error:  # the others may fit where this one does not
                trouble = error
                continue
            if best is None or taken < best[0]:
                best = taken, thunk, variant.words, None if variant.prepare and self.direction == "backward" else result
        if best is None:
            raise trouble or RuntimeError("no variant")
        return best[1:]

    def trace(self, contender: Contender) -> None:
        """Traces a contender for a GPU that is not there.

        Raises:
          Exception: what is said of the last variant, if none can be traced.
        """
        trouble: Exception | None = None
        with compat.traced_for("NVIDIA H200", "cuda", devices.device("h200").sm_count):
            for variant in contender.variants():
                try:
                    prepared = jax.eval_shape(variant.prepare or dict, dict(self.arrays))
                    jax.eval_shape(variant.function, prepared)
                    return
                except Exception as error:
                    trouble = error
        raise trouble or RuntimeError("no variant")

    def _compiled(self, variant: Variant) -> Thunk:
        arrays = dict(variant.prepare(self.arrays) if variant.prepare else self.arrays)
        if self.direction == "forward":
            run = jax.jit(variant.function)
            return lambda: run(arrays)
        # The backward alone: what the forward leaves for it is made once.
        seed = cotangents(variant.function, arrays)
        pull = jax.jit(lambda arrays: pullback(self.problem, variant.function, arrays)[1])(arrays)
        run = jax.jit(lambda pull, seed: pull(seed)[0])
        return lambda: run(pull, seed)

    def disagreement(self, got: Any, want: Any) -> tuple[float, float]:
        """How far one result is from another, and how far it may be: both are rounded."""
        pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        found = max((float(deviation(one, other)) for one, other in pairs), default=0.0)
        floats = [leaf for leaf in jax.tree.leaves((want, dict(self.arrays))) if leaf.dtype.itemsize > 1]
        limit = self.problem.tolerance or rtol(coarsest(floats), self.problem.length)
        return found, 2 * limit * (GRADIENT_FACTOR if self.direction == "backward" else 1)

    def work(self) -> tuple[float, str]:
        """Operations or bytes of one call. Backward: two products for each of the forward, five for attention's two."""
        op = registry.ops()[self.problem.op]
        given: dict[str, Any] = {**self.arrays, **self.problem.options}
        request = op.request((), op.prepare(given) if op.prepare else given)
        forward_cost, back = op.cost(request), self.direction == "backward"
        if op.name == "matmul":
            return forward_cost.flops * len(moving(self.problem, self.arrays)) ** back, "FLOP/s"
        if op.name == "attention":
            return forward_cost.flops * 2.5**back, "FLOP/s"
        cost = op.vjp.cost(backward_request(op, request)) if back else forward_cost
        return cost.bytes, "B/s"

    def peak(self, unit: str) -> float:
        """The declared peak of the device in this unit; 0 where it is not known."""
        device = devices.from_jax(jax.devices()[0])
        if unit == "B/s":
            return device.hbm_bandwidth
        dtype = next(iter(self.arrays.values())).dtype
        return device.peak("tf32" if dtype == jnp.float32 else dtype)


def race(
    run: Race, say: Say, begin: Callable[[str], None], *, without: frozenset[str], rounds: int, measured: bool
) -> None:
    """Gives a row for each contender: at once for one that cannot run, at the end for those that were timed.

    Args:
      run: the call.
      say: takes the rows.
      begin: is told what is about to happen, in case that nothing comes back.
      without: contenders to leave out.
      rounds: measurements of each contender, one of each in turn.
      measured: on a real GPU; otherwise times mean nothing, and everyone runs once.
    """
    thunks: dict[str, tuple[Thunk, str, Any]] = {}
    for name, contender in run.contenders.items():
        if name in without:
            continue
        begin(name)
        refused = run.refusal(name)
        if refused:
            say(name, {"status": "refused", "detail": refused})
            continue
        try:
            if contender.gpu and not measured:
                run.trace(contender)
                say(name, {"status": "skipped", "detail": "needs a GPU; traced only"})
            else:
                thunks[name] = run.ready(contender)
        except Exception as error:
            said = said_by(error)
            if contender.gpu and not measured:
                said = f"needs a GPU; tracing it: {said}"
            say(name, {"status": "skipped" if contender.gpu and not measured else "failed", "detail": said})
            usable()
    begin("timing")
    deviations = _compare(run, thunks)
    times = _rounds({name: thunk for name, (thunk, _, _) in thunks.items()}, rounds if measured else 1)
    amount, unit = run.work()
    peak = run.peak(unit) if measured else 0.0
    base = times.get(BACKEND)
    for name, taken in times.items():
        median = statistics.median(taken)
        words = thunks[name][1]
        row: Row = {
            "status": "ok" if measured else "simulated", "median_s": median, "min_s": min(taken), "rounds": len(taken),
            "rate": amount / median, "unit": unit, "of_peak": amount / median / peak if peak else None,
            "to_ours": base and statistics.median(x / y for x, y in zip(taken, base, strict=True)),
            "detail": words, **deviations.get(name, {}),
        }  # fmt: skip
        say(name, row)


def _compare(run: Race, thunks: Mapping[str, tuple[Thunk, str, Any]]) -> dict[str, Row]:
    """How far each result is from that of plain XLA."""
    want = thunks.get("xla", (None, "", None))[2]
    rows: dict[str, Row] = {}
    for name, (_, _, got) in thunks.items():
        if name != "xla" and got is not None and want is not None:
            found, limit = run.disagreement(got, want)
            rows[name] = {"error": found, "tolerance": limit}
            if not found <= limit:
                rows[name] |= {"status": "wrong", "detail": "disagrees with xla"}
    return rows


def _rounds(thunks: Mapping[str, Thunk], rounds: int) -> dict[str, list[float]]:
    """Seconds of a call by contender, one measurement of each in turn."""
    inner = {name: max(1, min(500, round(BURST / max(_burst(thunk, 1), 1e-6)))) for name, thunk in thunks.items()}
    if rounds == 1:
        inner = dict.fromkeys(inner, 1)
    times: dict[str, list[float]] = {name: [] for name in thunks}
    for _ in range(rounds):
        for name, thunk in thunks.items():
            jax.block_until_ready(thunk())  # what the one before has left behind is not this one's
            times[name].append(_burst(thunk, inner[name]))
    return times


def _burst(thunk: Thunk, inner: int) -> float:
    start = time.perf_counter()
    out = None
    for _ in range(inner):
        out = thunk()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / inner


def floor() -> float:
    """Seconds that it takes to send one program to the device: calls shorter than this cannot be told apart."""
    run = jax.jit(lambda x: x + 1)
    x = jax.block_until_ready(run(jnp.zeros(8)))
    return statistics.median(_burst(lambda: run(x), 500) for _ in range(5))


def said_by(error: BaseException) -> str:
    """The first line of an error; of one inside of a simulated program, which comes with its traceback, the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "CpuCallback" in lines[0]:
        return next((line for line in reversed(lines) if re.match(r"[\w.]*(Error|Exception): ", line)), lines[0])
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


class DeviceLostError(Exception):
    """The device answers no more: this process is of no more use."""


def usable() -> None:
    """Makes sure that the device still answers after a failure.

    Raises:
      DeviceLostError: it does not.
    """
    try:
        jax.block_until_ready(jax.jit(lambda x: x + 1)(jnp.zeros(8)))
    except Exception as error:
        raise DeviceLostError(said_by(error)) from error

"""`shard_map` with its default arguments, on as many devices as there are."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from opmux.core.cases.case import Case
from opmux.core.errors import ForcedBackendError
from opmux.testing.case_call import batch_of
from opmux.testing.gradients import rms, value_and_gradients
from opmux.testing.subject import Arrays, Rejected, Subject, arguments, floating, longest_axis, quick_jit
from opmux.testing.tolerances import GRADIENT_FACTOR, assert_close, coarsest, rtol

MIN_DEVICES = 2
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


def check_shard_map(subject: Subject, case: Case) -> None:
    """One element of a batch on each device equals a loop over the batch.

    Results and gradients are computed inside of `shard_map` with every array distributed, and the compiled program
    must not communicate. Gradients are also taken from outside, with the last floating array shared by all devices:
    its cotangents have to be summed.

    Raises:
      Rejected: the backend does not take a case that is traced inside `shard_map`.
      AssertionError: results or gradients differ, or the devices communicate needlessly.
    """
    count = jax.device_count()
    assert count >= MIN_DEVICES, f"shard_map needs {MIN_DEVICES} devices; there are {count}"
    mesh = jax.make_mesh((count,), ("batch",))
    arrays, rest = arguments(subject.op, case)
    batch = batch_of(subject.op, arrays, rest, count)
    run = partial(subject.results, rest=rest)
    what = f"{subject} {case.name}: shard_map"

    def inside(arrays: Arrays) -> Any:
        return _grown(value_and_gradients(run, {name: array[0] for name, array in arrays.items()}))

    placed = jax.device_put(batch, NamedSharding(mesh, P("batch")))
    try:
        program = quick_jit(_shard_map(inside, mesh, dict.fromkeys(arrays, P("batch")))).lower(placed).compile()
    except ForcedBackendError as error:
        candidate = error.decision.candidate(subject.backend)
        raise Rejected(what, candidate.reasons) from None
    found = [word for word in COLLECTIVES if word in program.as_text()]
    assert not found, f"{what}: distributed arrays need no {', '.join(found)}"
    one = quick_jit(partial(value_and_gradients, run))
    each = [one({name: array[i] for name, array in batch.items()}) for i in range(count)]
    _compare(subject, case, program(placed), jax.tree.map(lambda *leaves: jnp.stack(leaves), *each), what)

    shared = floating(arrays)[-1:] if len(arrays) > 1 else []
    if shared:
        given = {name: arrays[name] if name in shared else batch[name] for name in arrays}
        specs = {name: P() if name in shared else P("batch") for name in arrays}

        def local(arrays: Arrays) -> Any:
            return _grown(run({name: array if name in shared else array[0] for name, array in arrays.items()}))

        outside = partial(value_and_gradients, _shard_map(local, mesh, specs))
        loop = [{**given, **{name: given[name][i] for name in given if name not in shared}} for i in range(count)]
        want = [one(arrays) for arrays in loop]
        results = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(result for result, _ in want))
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(gradients for _, gradients in want))
        summed = {name: _sum(leaf) if name in shared else leaf for name, leaf in stacked.items()}
        placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in given.items()}
        _compare(subject, case, quick_jit(outside)(placed), (results, summed), f"{what} with {shared[0]!r} shared")


def _shard_map(run: Any, mesh: Any, specs: Mapping[str, Any]) -> Any:
    return jax.shard_map(run, mesh=mesh, in_specs=(dict(specs),), out_specs=P("batch"))


def _grown(results: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[None], results)


def _sum(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.float32).sum(0).astype(leaf.dtype)


def _compare(subject: Subject, case: Case, got: Any, want: Any, what: str) -> None:
    arrays, _ = arguments(subject.op, case)
    tolerance = case.rtol or 2 * rtol(coarsest(arrays.values()), longest_axis(arrays))
    for number, (one, other) in enumerate(zip(got[0], want[0], strict=True)):
        assert_close(one, other, tolerance, f"{what}: result {number}")
    floor = max(map(rms, want[1].values()), default=0.0)
    for name, gradient in want[1].items():
        label = f"{what}: cotangent of {name!r}"
        assert_close(got[1][name], gradient, GRADIENT_FACTOR * tolerance, label, floor=floor)

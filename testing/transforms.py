"""JAX's transforms, each against the plain loop that it abbreviates.

Every check computes results *and* gradients in one compiled function, so that one compilation proves both. What it
is compared with are the same results and gradients, one call after another, by the same implementation: that those
are right is the business of `check_numerics` and `check_gradients`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from opmux.core.cases.case import Case
from opmux.core.errors import DifferentiationError
from opmux.core.op import Op
from opmux.testing.case_call import BATCH, case_call, inexact, stack
from opmux.testing.gradients import rms
from opmux.testing.subject import Arrays, Subject, arguments, floating, longest_axis, quick_jit
from opmux.testing.tolerances import assert_close, rtol

JACOBIAN_ROWS = 16
"""Leading elements of the first result whose derivatives are formed one by one."""


def check_jit(subject: Subject, case: Case) -> None:
    """`jit` gives what the eager call gives, alone and under an eager `vjp`."""
    call = case_call(subject, case)
    got = jax.jit(call)(call.arrays)
    call.compare((got[0], {}), (call.results(call.arrays), {}), "jit against eager")
    call.compare(got, call(call.arrays), "jit against an eager vjp")


def check_vmap(subject: Subject, case: Case) -> None:
    """`vmap` of results and gradients over subsets of the arrays equals a loop; along other axes too."""
    call = case_call(subject, case)
    for number, mapped in enumerate(_subsets(list(call.arrays))):
        axes = {name: (0 if name in mapped else None) for name in call.arrays}
        batch = call.select(mapped)
        if number == 0:  # once with the batch axis last
            axes = {name: None if axis is None else call.arrays[name].ndim for name, axis in axes.items()}
            batch = {name: np.moveaxis(batch[name], 0, -1) if name in mapped else batch[name] for name in batch}
        got = quick_jit(jax.vmap(call, in_axes=(axes,)))(batch)
        call.compare(got, call.loop(mapped), f"vmap over {', '.join(mapped)}")


def check_nested_vmap(subject: Subject, case: Case) -> None:
    """`vmap` of `vmap`, each over other arrays, equals two loops."""
    call = case_call(subject, case)
    names = list(call.arrays)
    outer, inner = names[::2], names[1::2]
    axes = [{name: (0 if name in mapped else None) for name in names} for mapped in (outer, inner)]
    got = quick_jit(jax.vmap(jax.vmap(call, in_axes=(axes[1],)), in_axes=(axes[0],)))(call.select(names))
    want = [
        stack([
            call.compiled({name: call.batch[name][j if name in inner else i] for name in names})
            for j in range(BATCH)
        ])
        for i in range(BATCH)
    ]  # fmt: skip
    call.compare(got, stack(want), "nested vmap")


def check_vmap_of_nothing(subject: Subject, case: Case) -> None:
    """`vmap` over a batch of size 0 gives empty results of the right shapes."""
    call = case_call(subject, case)
    got = quick_jit(jax.vmap(call))({name: array[:0] for name, array in call.batch.items()})
    want = jax.eval_shape(jax.vmap(call), call.batch)
    for one, spec in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.shape, one.dtype) == ((0, *spec.shape[1:]), spec.dtype), f"{subject} {case.name}: vmap of nothing"


def check_grad_of_vmap(subject: Subject, case: Case) -> None:
    """`grad` of a `vmap` in which one array is shared sums its cotangents."""
    call = case_call(subject, case)
    shared = list(call.moving)[-1]
    mapped = [name for name in call.arrays if name != shared]
    axes = {name: (0 if name in mapped else None) for name in call.arrays}
    batch = call.select(mapped)

    def loss(moving: Arrays) -> jax.Array:
        return jax.vmap(lambda arrays: call.loss(arrays), in_axes=(axes,), axis_size=BATCH)({**batch, **moving}).sum()

    got = quick_jit(jax.grad(loss))({name: batch[name] for name in call.moving})
    each = stack([call.gradient(*_part(call.element(i, mapped), list(call.moving))) for i in range(BATCH)])
    total = each[shared].astype(np.float64).sum(0)
    call.compare_gradients(got, {**each, shared: total}, f"grad of vmap with {shared!r} shared")


def check_scan(subject: Subject, case: Case) -> None:
    """Results and gradients inside a `scan` equal a loop; gradients through it have their primals' dtypes."""
    call = case_call(subject, case)
    _, got = quick_jit(lambda xs: lax.scan(lambda carry, arrays: (carry, call(arrays)), 0, xs))(call.batch)
    call.compare(got, call.loop(list(call.arrays)), "inside scan")
    if not call.moving:
        return

    def scanned(moving: Arrays) -> jax.Array:
        def step(total: jax.Array, factor: jax.Array) -> tuple[jax.Array, None]:
            return total + factor * call.loss(moving), None

        return lax.scan(step, jnp.float32(0), jnp.array([0.25, 0.5, 0.25], jnp.float32))[0]

    call.compare_gradients(quick_jit(jax.grad(scanned))(call.moving), call.gradient(call.moving), "grad through scan")


def check_remat(subject: Subject, case: Case) -> None:
    """`jax.checkpoint` changes no gradient."""
    call = case_call(subject, case)
    got = quick_jit(jax.grad(jax.checkpoint(call.loss)))(call.moving)
    call.compare_gradients(got, call.gradient(call.moving), "remat")


def check_jacobian(subject: Subject, case: Case) -> None:
    """Rows of the reverse-mode Jacobian sum up to the gradient of the sum."""
    call = case_call(subject, case)

    def first(moving: Arrays) -> jax.Array:
        return call.results({**call.arrays, **moving})[0].reshape(-1)[:JACOBIAN_ROWS]

    jacobian = quick_jit(jax.jacrev(first))(call.moving)
    want = quick_jit(jax.grad(lambda moving: first(moving).astype(jnp.float32).sum()))(call.moving)
    summed = {name: rows.astype(jnp.float32).sum(0).astype(rows.dtype) for name, rows in jacobian.items()}
    call.compare_gradients(summed, want, "jacobian")


def check_jvp(subject: Subject, case: Case) -> None:
    """Forward mode gives the directional derivative, or says that there is no rule."""
    call = case_call(subject, case)
    moving = {name: jnp.asarray(array) for name, array in call.moving.items()}
    tangent = {name: jnp.ones(array.shape, array.dtype) for name, array in moving.items()}
    try:
        _, got = quick_jit(lambda primal, tangent: jax.jvp(call.loss, (primal,), (tangent,)))(moving, tangent)
    except DifferentiationError:
        return
    want = [np.asarray(leaf).astype(np.float64) for leaf in call.gradient(moving).values()]
    scale = max((rms(leaf) * leaf.size for leaf in want), default=0.0)
    error = abs(float(got) - sum(float(leaf.sum()) for leaf in want))
    assert error <= call.gradient_rtol * scale, f"{subject} {case.name}: jvp is off by {error:.2g} of {scale:.2g}"


def check_export(subject: Subject, case: Case) -> None:
    """`jax.export` survives a round trip through bytes."""
    call = case_call(subject, case)
    exported = export.export(jax.jit(call.results))(call.arrays)
    if importlib.util.find_spec("flatbuffers") is not None:  # JAX needs it for the bytes
        exported = export.deserialize(exported.serialize())
    results: Any = exported.call(call.arrays)
    call.compare((results, {}), (call.compiled(call.arrays)[0], {}), "export")


def check_x64(subject: Subject, case: Case) -> None:
    """64-bit mode changes no result, gradient or dtype of 32-bit arrays; float64 arrays are accurate as such."""
    call = case_call(subject, case)
    want = call.compiled(call.arrays)
    with jax.enable_x64(True):
        got = quick_jit(call)(call.arrays)
        if all(map(inexact, call.arrays.values())):
            dtypes = [(one.dtype, other.dtype) for one, other in zip(got[0], want[0], strict=True)]
            assert all(one == other for one, other in dtypes), f"{subject} {case.name}: dtypes under x64: {dtypes}"
        call.compare(got, want, "x64")
        wide = {name: array.astype(np.float64) if inexact(array) else array for name, array in call.arrays.items()}
        results = quick_jit(call.results)(wide) if call.moving else []
        for number, (one, other) in enumerate(zip(results, subject.wanted({**wide, **call.rest}), strict=False)):
            assert_close(one, other, rtol(one.dtype, longest_axis(wide)), f"{subject} {case.name}: float64 {number}")


TRANSFORMS: dict[str, Callable[[Subject, Case], None]] = {
    "jit": check_jit,
    "vmap": check_vmap,
    "nested_vmap": check_nested_vmap,
    "vmap_of_nothing": check_vmap_of_nothing,
    "grad_of_vmap": check_grad_of_vmap,
    "scan": check_scan,
    "remat": check_remat,
    "jacobian": check_jacobian,
    "jvp": check_jvp,
    "export": check_export,
    "x64": check_x64,
}
"""Every transform, by name."""

DERIVATIVES = ("grad_of_vmap", "remat", "jacobian", "jvp")
"""Transforms that say nothing about a case without floating arrays."""


def applies(subject: Subject, transform: str, case: Case) -> bool:
    """Whether a transform says anything about a case."""
    arrays, _ = arguments(subject.op, case)
    if transform == "nested_vmap":
        return len(arrays) > 1
    return bool(floating(arrays) if transform in DERIVATIVES else arrays)


def check_transforms(subject: Subject, case: Case) -> None:
    """Runs every transform that applies to a case.

    Raises:
      Rejected: the backend does not take the case.
      AssertionError: a transform changes something.
    """
    subject.decision(case)
    for name, check in TRANSFORMS.items():
        if applies(subject, name, case):
            check(subject, case)


def transform_cases(op: Op) -> list[Case]:
    """The cases of an op that run under every transform: those that say so, else the first three."""
    cases = list(op.cases())
    return [case for case in cases if case.transforms] or cases[:3]


def _subsets(names: list[str]) -> Iterator[list[str]]:
    """The first array alone, all but the first, and all; of two arrays only the first and both."""
    yield names[:1]
    if len(names) > 2:
        yield names[1:]
    if len(names) > 1:
        yield names


def _part(arrays: Arrays, names: Sequence[str]) -> tuple[Arrays, Arrays]:
    return {name: arrays[name] for name in names}, {name: arrays[name] for name in arrays if name not in names}

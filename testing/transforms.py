"""JAX's transforms, each against the plain loop that it abbreviates.

Every check computes results *and* gradients in one compiled function, so that one compilation proves both. What it
is compared with are the same results and gradients, one call after another, by the same implementation: that those
are right is the business of `check_numerics` and `check_gradients`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax

from opmux.core.cases.case import Case
from opmux.core.errors import ArgumentError, DifferentiationError
from opmux.core.op import Op
from opmux.testing.gradients import rms, value_and_gradients
from opmux.testing.subject import Arrays, Subject, arguments, floating, longest_axis
from opmux.testing.tolerances import GRADIENT_FACTOR, assert_close, coarsest, rtol

BATCH = 3
JACOBIAN_LIMIT = 64
"""Elements of results and of an argument up to which a full Jacobian is formed."""

Results = tuple[list[Any], dict[str, Any]]


class _Call:
    """A case as a function of its arrays, which gives results and gradients."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject, self.case = subject, case
        self.arrays, self.rest = arguments(subject.op, case)
        self.batch = batch_of(subject.op, self.arrays, self.rest)
        accurate = rtol(coarsest(self.arrays.values()), longest_axis(self.arrays))
        self.rtol = case.rtol or 2 * accurate
        self.gradient_rtol = case.rtol or 2 * GRADIENT_FACTOR * accurate

    def __call__(self, arrays: Arrays) -> Results:
        return value_and_gradients(partial(self.subject.results, rest=self.rest), arrays)

    def loss(self, arrays: Arrays, fixed: Mapping[str, Any]) -> jax.Array:
        """A number that every floating result matters to."""
        leaves = self.subject.results({**fixed, **arrays}, self.rest)
        terms = [jnp.where(jnp.isfinite(leaf), leaf, 0).astype(jnp.float32).sum() for leaf in leaves if _inexact(leaf)]
        return jnp.sum(jnp.stack(terms))

    def element(self, index: int, mapped: Sequence[str]) -> Arrays:
        """The arrays of one element of the batch."""
        return {name: self.batch[name][index] if name in mapped else array for name, array in self.arrays.items()}

    def loop(self, mapped: Sequence[str]) -> Results:
        """The same function, one element after another."""
        run = jax.jit(self)
        each = [run(self.element(i, mapped)) for i in range(BATCH)]
        return jax.tree.map(lambda *parts: np.stack([np.asarray(part) for part in parts]), *each)

    def compare(self, got: Results, want: Results, what: str) -> None:
        """Asserts that results and gradients agree."""
        label = f"{self.subject} {self.case.name}: {what}"
        for number, (one, other) in enumerate(zip(got[0], want[0], strict=True)):
            assert_close(one, other, self.rtol, f"{label}: result {number}")
        self.compare_gradients(got[1], want[1], what)

    def compare_gradients(self, got: Mapping[str, Any], want: Mapping[str, Any], what: str) -> None:
        """Asserts that gradients agree, in value and dtype."""
        label = f"{self.subject} {self.case.name}: {what}"
        floor = max((rms(gradient) for gradient in want.values()), default=0.0)
        for name, gradient in want.items():
            dtype = self.arrays[name].dtype
            assert got[name].dtype == dtype, f"{label}: cotangent of {name!r} is {got[name].dtype}, not {dtype}"
            assert_close(got[name], gradient, self.gradient_rtol, f"{label}: cotangent of {name!r}", floor=floor)


def batch_of(op: Op, arrays: Arrays, rest: Mapping[str, Any], size: int = BATCH) -> Arrays:
    """A batch of each array whose elements differ from one another and are all valid.

    Floats are scaled, integers and booleans rotated along their first axis, as far as the op takes the values.
    """
    return {name: np.stack([_variant(op, arrays, rest, name, i) for i in range(size)]) for name in arrays}


def _variant(op: Op, arrays: Arrays, rest: Mapping[str, Any], name: str, number: int) -> Any:
    array = arrays[name]
    if jnp.issubdtype(array.dtype, jnp.inexact):
        return (array * (1 + number / 8)).astype(array.dtype)
    rolled = np.roll(array, number, axis=0) if array.ndim else array
    if op.check_values is not None and name in op.value_checked:
        shapes = {other: tuple(np.shape(value)) for other, value in {**arrays, **rest}.items() if value is not None}
        try:
            op.check_values({name: rolled}, shapes)
        except ArgumentError:
            return array
    return rolled


def check_jit(subject: Subject, case: Case) -> None:
    """`jit` gives what the eager call gives."""
    call = _Call(subject, case)
    call.compare(jax.jit(call)(call.arrays), call(call.arrays), "jit against eager")


def check_vmap(subject: Subject, case: Case) -> None:
    """`vmap` of results and gradients over subsets of the arrays equals a loop; along other axes too."""
    call = _Call(subject, case)
    for number, mapped in enumerate(_subsets(list(call.arrays))):
        axes = {name: (0 if name in mapped else None) for name in call.arrays}
        batch = {name: call.batch[name] if name in mapped else array for name, array in call.arrays.items()}
        if number == 0:  # once with the batch axis last
            axes = {name: None if axis is None else call.arrays[name].ndim for name, axis in axes.items()}
            batch = {name: np.moveaxis(batch[name], 0, -1) if name in mapped else batch[name] for name in batch}
        got = jax.jit(jax.vmap(call, in_axes=(axes,)))(batch)
        call.compare(got, call.loop(mapped), f"vmap over {', '.join(mapped)}")


def check_nested_vmap(subject: Subject, case: Case) -> None:
    """`vmap` of `vmap`, each over other arrays, equals two loops."""
    call = _Call(subject, case)
    names = list(call.arrays)
    outer, inner = names[::2], names[1::2] or names
    axes = [{name: (0 if name in mapped else None) for name in names} for mapped in (outer, inner)]
    batch: Arrays = {}
    for name in names:
        batch[name] = call.batch[name] if name in outer or name in inner else call.arrays[name]
        if name in outer and name in inner:
            batch[name] = np.stack([batch[name]] * BATCH)
    got = jax.jit(jax.vmap(jax.vmap(call, in_axes=(axes[1],)), in_axes=(axes[0],)))(batch)
    run = jax.jit(call)
    for i in range(BATCH):
        for j in range(BATCH):
            one = {
                name: call.batch[name][j] if name in inner else call.batch[name][i] if name in outer else array
                for name, array in call.arrays.items()
            }
            call.compare(jax.tree.map(lambda part: part[i, j], got), run(one), f"nested vmap, element {i}, {j}")  # noqa: B023


def check_vmap_of_nothing(subject: Subject, case: Case) -> None:
    """`vmap` over a batch of size 0 gives empty results of the right shapes."""
    call = _Call(subject, case)
    empty = {name: array[:0] for name, array in call.batch.items()}
    got = jax.jit(jax.vmap(call))(empty)
    want = jax.eval_shape(jax.vmap(call), call.batch)
    for one, spec in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (one.shape, one.dtype) == ((0, *spec.shape[1:]), spec.dtype), f"{subject} {case.name}: vmap of nothing"


def check_grad_of_vmap(subject: Subject, case: Case) -> None:
    """`grad` of a `vmap` in which some arrays are shared sums their cotangents."""
    call = _Call(subject, case)
    names = floating(call.arrays)
    mapped = [name for name in call.arrays if name != names[-1]] or names
    axes = {name: (0 if name in mapped else None) for name in call.arrays}
    batch = {name: call.batch[name] if name in mapped else array for name, array in call.arrays.items()}

    def mapped_loss(moving: Arrays, fixed: Arrays) -> jax.Array:
        return jax.vmap(lambda arrays: call.loss(arrays, {}), in_axes=(axes,))({**fixed, **moving}).sum()

    def looped_loss(moving: Arrays, fixed: Arrays) -> jax.Array:
        both = {**fixed, **moving}
        return sum(  # pyright: ignore[reportReturnType]
            call.loss({name: both[name][i] if name in mapped else both[name] for name in both}, {})
            for i in range(BATCH)
        )

    moving, fixed = _part(batch, names)
    got, want = jax.jit(jax.grad(mapped_loss))(moving, fixed), jax.jit(jax.grad(looped_loss))(moving, fixed)
    call.compare_gradients(got, want, "grad of vmap")


def check_scan(subject: Subject, case: Case) -> None:
    """Results and gradients inside a `scan` equal a loop; gradients through it have their primals' dtypes."""
    call = _Call(subject, case)
    _, got = jax.jit(lambda xs: lax.scan(lambda carry, arrays: (carry, call(arrays)), 0, xs))(call.batch)
    call.compare(got, call.loop(list(call.arrays)), "inside scan")
    moving, fixed = _part(call.arrays, floating(call.arrays))

    def scanned(moving: Arrays) -> jax.Array:
        def step(total: jax.Array, factor: jax.Array) -> tuple[jax.Array, None]:
            return total + factor * call.loss(moving, fixed), None

        return lax.scan(step, jnp.float32(0), jnp.arange(3, dtype=jnp.float32))[0]

    got_gradients = jax.jit(jax.grad(scanned))(moving)
    want_gradients = jax.jit(jax.grad(lambda moving: 3 * call.loss(moving, fixed)))(moving)
    call.compare_gradients(got_gradients, want_gradients, "grad through scan")


def check_remat(subject: Subject, case: Case) -> None:
    """`jax.checkpoint` changes no gradient."""
    call = _Call(subject, case)
    moving, fixed = _part(call.arrays, floating(call.arrays))
    loss = partial(call.loss, fixed=fixed)
    call.compare_gradients(jax.jit(jax.grad(jax.checkpoint(loss)))(moving), jax.jit(jax.grad(loss))(moving), "remat")


def check_jacobian(subject: Subject, case: Case) -> None:
    """Rows of the reverse-mode Jacobian sum up to the gradient of the sum."""
    call = _Call(subject, case)
    moving, fixed = _part(call.arrays, floating(call.arrays))

    def first(moving: Arrays) -> jax.Array:
        return call.subject.results({**fixed, **moving}, call.rest)[0].reshape(-1)[:JACOBIAN_LIMIT]

    jacobian = jax.jit(jax.jacrev(first))(moving)
    want = jax.jit(jax.grad(lambda moving: first(moving).sum().astype(jnp.float32)))(moving)
    call.compare_gradients({name: rows.sum(0) for name, rows in jacobian.items()}, want, "jacobian")


def check_jvp(subject: Subject, case: Case) -> None:
    """Forward mode gives the directional derivative, or says that there is no rule and who has one."""
    call = _Call(subject, case)
    moving, fixed = _part(call.arrays, floating(call.arrays))
    loss = partial(call.loss, fixed=fixed)
    moving = jax.tree.map(jnp.asarray, moving)
    tangent = jax.tree.map(lambda array: jnp.ones(array.shape, array.dtype), moving)
    try:
        _, got = jax.jit(lambda primal, tangent: jax.jvp(loss, (primal,), (tangent,)))(moving, tangent)
    except DifferentiationError:
        return
    want = [np.asarray(leaf).astype(np.float64) for leaf in jax.tree.leaves(jax.jit(jax.grad(loss))(moving))]
    scale = max((rms(leaf) * leaf.size for leaf in want), default=0.0)
    error = abs(float(got) - sum(float(leaf.sum()) for leaf in want))
    assert error <= call.gradient_rtol * scale, f"{subject} {case.name}: jvp is off by {error:.2g} of {scale:.2g}"


def check_export(subject: Subject, case: Case) -> None:
    """`jax.export` survives a round trip through bytes."""
    call = _Call(subject, case)
    exported = export.export(jax.jit(lambda arrays: call.subject.results(arrays, call.rest)))(call.arrays)
    if importlib.util.find_spec("flatbuffers") is not None:  # JAX needs it for the bytes
        exported = export.deserialize(exported.serialize())
    call.compare((exported.call(call.arrays), {}), (call.subject.results(call.arrays, call.rest), {}), "export")


def check_x64(subject: Subject, case: Case) -> None:
    """64-bit mode changes no result, gradient or dtype of 32-bit arrays; float64 arrays are accurate as such."""
    call = _Call(subject, case)
    want = jax.jit(call)(call.arrays)
    with jax.enable_x64(True):
        got = jax.jit(call)(call.arrays)
        if all(_inexact(array) for array in call.arrays.values()):
            dtypes = [(one.dtype, other.dtype) for one, other in zip(got[0], want[0], strict=True)]
            assert all(one == other for one, other in dtypes), f"{subject} {case.name}: dtypes under x64: {dtypes}"
        call.compare(got, want, "x64")
        wide = {name: array.astype(np.float64) if _inexact(array) else array for name, array in call.arrays.items()}
        results = subject.results(wide, call.rest) if floating(wide) else []
        for number, (one, other) in enumerate(zip(results, subject.wanted(wide, call.rest), strict=False)):
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
    """The first array alone, all but the first, and all."""
    yield names[:1]
    if len(names) > 1:
        yield names[1:]
        yield names


def _part(arrays: Arrays, names: Sequence[str]) -> tuple[Arrays, Arrays]:
    return {name: arrays[name] for name in names}, {name: arrays[name] for name in arrays if name not in names}


def _inexact(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)

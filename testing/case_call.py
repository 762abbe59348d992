"""A case as a function of its arrays, and a batch of it: what transforms are applied to and compared with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core.cases.case import Case
from opmux.core.errors import ArgumentError
from opmux.core.op import Op
from opmux.testing.gradients import rms, value_and_gradients
from opmux.testing.subject import Arrays, Subject, arguments, floating, longest_axis, quick_jit
from opmux.testing.tolerances import GRADIENT_FACTOR, assert_close, coarsest, rtol

BATCH = 3

Results = tuple[list[Any], dict[str, Any]]


class CaseCall:
    """A case as a function of its arrays, which gives results and gradients."""

    def __init__(self, subject: Subject, case: Case) -> None:
        self.subject, self.case = subject, case
        self.arrays, self.rest = arguments(subject.op, case)
        self.batch = batch_of(subject.op, self.arrays, self.rest)
        self.moving = {name: self.arrays[name] for name in floating(self.arrays)}
        accurate = rtol(coarsest(self.arrays.values()), longest_axis(self.arrays))
        self.rtol = case.rtol or 2 * accurate
        self.gradient_rtol = case.rtol or 2 * GRADIENT_FACTOR * accurate
        self.compiled = quick_jit(self)
        self.gradient = quick_jit(jax.grad(self.loss))

    def __call__(self, arrays: Arrays) -> Results:
        """The results and their gradients."""
        return value_and_gradients(self.results, arrays)

    def results(self, arrays: Arrays) -> list[Any]:
        """The results alone."""
        return self.subject.results(arrays, self.rest)

    def loss(self, moving: Arrays, others: Arrays | None = None) -> jax.Array:
        """A number that every floating result matters to; `others` are the arrays that have no gradient."""
        leaves = self.results({**self.arrays, **(others or {}), **moving})
        terms = [jnp.where(jnp.isfinite(leaf), leaf, 0).astype(jnp.float32).sum() for leaf in leaves if inexact(leaf)]
        return jnp.sum(jnp.stack(terms))

    def select(self, mapped: Sequence[str]) -> Arrays:
        """The arrays, those to be mapped as a batch."""
        return {name: self.batch[name] if name in mapped else array for name, array in self.arrays.items()}

    def element(self, index: int, mapped: Sequence[str]) -> Arrays:
        """The arrays of one element of the batch."""
        return {name: self.batch[name][index] if name in mapped else array for name, array in self.arrays.items()}

    def loop(self, mapped: Sequence[str]) -> Results:
        """The same function, one element after another."""
        return stack([self.compiled(self.element(i, mapped)) for i in range(BATCH)])

    def compare(self, got: Results, want: Results, what: str) -> None:
        """Asserts that results and gradients agree."""
        label = f"{self.subject} {self.case.name}: {what}"
        for number, (one, other) in enumerate(zip(got[0], want[0], strict=True)):
            assert_close(one, other, self.rtol, f"{label}: result {number}")
        self.compare_gradients(got[1], want[1], what)

    def compare_gradients(self, got: Mapping[str, Any], want: Mapping[str, Any], what: str) -> None:
        """Asserts that gradients agree, in value and dtype."""
        label = f"{self.subject} {self.case.name}: {what}"
        floor = max(map(rms, want.values()), default=0.0)
        for name, gradient in want.items():
            dtype = self.arrays[name].dtype
            assert got[name].dtype == dtype, f"{label}: cotangent of {name!r} is {got[name].dtype}, not {dtype}"
            assert_close(got[name], gradient, self.gradient_rtol, f"{label}: cotangent of {name!r}", floor=floor)


@lru_cache(maxsize=8)
def case_call(subject: Subject, case: Case) -> CaseCall:
    """One object for all transforms of a case, so that what they are compared with is compiled once."""
    return CaseCall(subject, case)


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


def stack(each: Sequence[Any]) -> Any:
    """Trees of arrays as one tree of stacked arrays."""
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *each)


def inexact(array: Any) -> bool:
    """Whether an array is of floating or complex numbers."""
    return jnp.issubdtype(array.dtype, jnp.inexact)

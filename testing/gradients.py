"""Gradients against finite differences of the float64 oracle.

Along a direction `u` the derivative of `<c, f(x)>` is `<g, u>`, where `g` is the gradient that the implementation
gives for the cotangent `c`. Central differences of the oracle know it to about ten digits, more than any
float32 gradient has, and need neither a backward pass nor JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core.cases.case import Case
from opmux.testing.subject import Arrays, Subject, arguments, floating, longest_axis, quick_jit
from opmux.testing.tolerances import GRADIENT_FACTOR, coarsest, rtol

STEP = 1e-5


def check_gradients(subject: Subject, case: Case) -> None:
    """Checks the gradients with respect to every floating argument, together and one by one.

    Each argument is tested along a dense direction, along a few single elements, and along its last element,
    where tails go wrong.

    Raises:
      AssertionError: a cotangent has another shape or dtype than its primal, is not finite, or points elsewhere
        than the differences do.
    """
    arrays, rest = arguments(subject.op, case)
    moving = floating(arrays)
    rng = np.random.default_rng(7)
    cotangents = [rng.standard_normal(want.shape) for want in subject.wanted({**arrays, **rest})]
    run = partial(subject.results, rest=rest)
    outputs, gradients = quick_jit(lambda arrays: value_and_gradients(run, arrays, cotangents))(arrays)
    cotangents = [_as_output(c, out) for c, out in zip(cotangents, outputs, strict=True)]

    wide: dict[str, np.ndarray] = {}
    for name in moving:
        gradient, primal = gradients[name], arrays[name]
        what = f"{subject} {case.name}: cotangent of {name!r}"
        assert gradient.dtype == primal.dtype, f"{what}: dtype {gradient.dtype}, not {primal.dtype}"
        assert gradient.shape == primal.shape, f"{what}: shape {gradient.shape}, not {primal.shape}"
        wide[name] = np.asarray(gradient).astype(np.float64)
        assert np.isfinite(wide[name]).all(), f"{what}: {(~np.isfinite(wide[name])).sum()} elements are not finite"

    floor = max((rms(gradient) for gradient in wide.values()), default=0.0)
    tolerance = max(case.rtol or 0.0, GRADIENT_FACTOR * rtol(coarsest(arrays.values()), longest_axis(arrays)))
    for name in moving:
        for label, direction in _directions(rng, wide[name]):
            want = _difference(subject, arrays, rest, name, direction, cotangents)
            terms = wide[name] * direction
            scale = np.linalg.norm(terms) + max(rms(wide[name]), floor) * np.linalg.norm(direction)
            got = terms.sum()
            assert abs(got - want) <= tolerance * scale, (
                f"{subject} {case.name}: derivative along {label} of {name!r}: got {got:.9g}, want {want:.9g}, "
                f"off by {abs(got - want):.2g}, allowed {tolerance * scale:.2g}"
            )


def value_and_gradients(
    run: Callable[[Arrays], list[Any]], arrays: Mapping[str, Any], cotangents: list[Any] | None = None
) -> tuple[list[Any], dict[str, Any]]:
    """The results of a function of arrays, and the cotangents of the floating ones.

    Args:
      run: the function.
      arrays: what it takes.
      cotangents: cotangents of the results, ones by default; those of integer results are ignored.
    """
    names = floating(arrays)
    fixed = {name: array for name, array in arrays.items() if name not in names}
    moving = {name: jnp.asarray(arrays[name]) for name in names}
    outputs, pullback = jax.vjp(lambda moving: run({**fixed, **moving}), moving)
    given = [jnp.ones_like(out) for out in outputs] if cotangents is None else cotangents
    (gradients,) = pullback([_as_cotangent(c, out) for c, out in zip(given, outputs, strict=True)])
    return outputs, gradients


def _as_cotangent(cotangent: Any, output: Any) -> Any:
    if not jnp.issubdtype(output.dtype, jnp.inexact):
        return np.zeros(output.shape, jax.dtypes.float0)
    return jnp.asarray(cotangent).astype(output.dtype)


def _as_output(cotangent: np.ndarray, output: Any) -> np.ndarray:
    """The cotangent that the implementation saw: rounded, and nothing for an integer result."""
    if not jnp.issubdtype(output.dtype, jnp.inexact):
        return np.zeros(output.shape)
    return np.asarray(cotangent).astype(np.dtype(output.dtype)).astype(np.float64)


def _directions(rng: np.random.Generator, gradient: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    if not gradient.size:
        return
    yield "a dense direction", rng.standard_normal(gradient.shape)
    few = np.zeros(gradient.size)
    few[rng.integers(gradient.size, size=min(3, gradient.size))] = 1.0
    yield "a few elements", few.reshape(gradient.shape)
    last = np.zeros(gradient.size)
    last[-1] = 1.0
    yield "the last element", last.reshape(gradient.shape)


def _difference(
    subject: Subject,
    arrays: Arrays,
    rest: Mapping[str, Any],
    name: str,
    direction: np.ndarray,
    cotangents: list[np.ndarray],
) -> float:
    """Central difference of the oracle along a direction of one argument.

    Results that are not finite (the log-sum-exp of an empty row) do not move, so they count as constant.
    """
    base = np.asarray(arrays[name]).astype(np.float64)
    wide = {other: array.astype(np.float64) if other in floating(arrays) else array for other, array in arrays.items()}
    plus, minus = (subject.wanted({**rest, **wide, name: base + step * direction}) for step in (STEP, -STEP))
    total = 0.0
    for high, low, cotangent in zip(plus, minus, cotangents, strict=True):
        steady = np.isfinite(high) & np.isfinite(low)
        change = np.where(steady, high, 0.0) - np.where(steady, low, 0.0)
        total += float((change * cotangent).sum())
    return total / (2 * STEP)


def rms(array: Any) -> float:
    """Root mean square; 0 for an empty array."""
    wide = np.asarray(array).astype(np.float64)
    return float(np.sqrt(np.mean(np.square(wide)))) if wide.size else 0.0

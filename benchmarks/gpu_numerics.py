"""How far results of `mosaic_gpu` are from XLA's in float32 at the highest precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from gpu_problems import Direction, Problem

from opmux import registry
from opmux.testing.tolerances import GRADIENT_FACTOR, coarsest, rtol

Arrays = Mapping[str, jax.Array]
Function = Callable[[Arrays], Any]
Row = dict[str, Any]
BACKEND = "mosaic_gpu"


def refusal(problem: Problem, direction: Direction, arrays: Arrays) -> tuple[str, str]:
    """Why the backend does not take a call, and whose backward it gets; empty where there is nothing to say."""
    if not any(found.backend == BACKEND for found in registry.implementations(problem.op)):
        return "no kernel is registered", ""
    decision = registry.get(problem.op, backend=BACKEND).explain(**arrays, **problem.options)
    if decision.backend != BACKEND:
        return _reasons(decision), ""
    backward = decision.backward
    if direction == "forward" or backward is None or backward.backend == BACKEND:
        return "", ""
    return "", "derivative of the reference"


def _reasons(decision: registry.Decision) -> str:
    mine = decision.candidate(BACKEND)
    found = [f"{reason.code}: {reason.detail}" for reason in mine.reasons] if mine is not None else []
    return "; ".join(found) or decision.reason


def check(problem: Problem, direction: Direction, arrays: Arrays, *, twice: bool) -> Row:
    """Runs one direction and compares it.

    Args:
      problem: the call.
      direction: forward, or the cotangents of everything that has any.
      arrays: the array arguments.
      twice: run it again, and see that the bits are the same.

    Returns:
      `status` (`ok`, `wrong`, `varies`, `refused`), `error` relative to the scale of a row, `tolerance`, and what
      is the matter.
    """
    refused, note = refusal(problem, direction, arrays)
    if refused:
        return {"status": "refused", "detail": refused}
    seed = cotangents(forward(problem, BACKEND), arrays) if direction == "backward" else None
    run = jax.jit(directed(problem, BACKEND, seed))
    got = run(arrays)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(directed(in_float32(problem), "xla", widened(seed)))(widened(arrays))
    errors = {
        name: float(deviation(leaf, other)) for (name, leaf), (_, other) in zip(_named(got), _named(want), strict=True)
    }
    floats = [leaf for leaf in jax.tree.leaves((got, dict(arrays))) if leaf.dtype.itemsize > 1]
    limit = problem.tolerance or rtol(coarsest(floats), problem.length)
    limit = limit if any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(got)) else 0.0
    limit *= GRADIENT_FACTOR if direction == "backward" else 1
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    row: Row = {"status": "ok", "error": errors[worst], "tolerance": limit, "errors": errors, "detail": note}
    if not errors[worst] <= limit:
        return {**row, "status": "wrong", "detail": " ".join(filter(None, [worst, note]))}
    if twice and not all(map(_same_bits, jax.tree.leaves(got), jax.tree.leaves(run(arrays)))):
        return {**row, "status": "varies", "detail": "two runs differ"}
    return row


def forward(problem: Problem, backend: str, config: Any = None) -> Function:
    """The call, as a function of its array arguments."""
    op = registry.get(problem.op, backend=backend, config=config)
    return lambda arrays: op(**arrays, **problem.options)


def moving(problem: Problem, arrays: Arrays) -> tuple[str, ...]:
    """Arguments that have cotangents."""
    names = registry.ops()[problem.op].differentiable
    return tuple(name for name in names if name in arrays and jnp.issubdtype(arrays[name].dtype, jnp.floating))


def pullback(problem: Problem, function: Function, arrays: Arrays) -> tuple[Any, Any]:
    """Outputs of a function, and what makes cotangents of the arguments from theirs."""
    names = moving(problem, arrays)
    fixed = {name: array for name, array in arrays.items() if name not in names}
    return jax.vjp(lambda some: function({**fixed, **some}), {name: arrays[name] for name in names})


def directed(problem: Problem, backend: str, seed: Any) -> Function:
    """The forward; or, given cotangents of its outputs, those of its arguments."""
    function = forward(problem, backend)
    if seed is None:
        return function
    return lambda arrays: pullback(problem, function, arrays)[1](seed)[0]


def cotangents(function: Function, arrays: Arrays) -> Any:
    """Normal cotangents for the outputs of a function."""
    outputs, tree = jax.tree.flatten(jax.eval_shape(function, dict(arrays)))
    keys = jax.random.split(jax.random.key(1), len(outputs))
    made = [
        jax.random.normal(key, out.shape, jnp.float32).astype(out.dtype) for key, out in zip(keys, outputs, strict=True)
    ]
    return jax.tree.unflatten(tree, made)


def widened(tree: Any) -> Any:
    """Floats in float32."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
    )


def in_float32(problem: Problem) -> Problem:
    """The call as the reference gets it: no result is rounded to less, no product is done in less."""
    options = dict(problem.options)
    if problem.op == "matmul":
        options["precision"] = "highest"
        if jnp.issubdtype(options.get("preferred_element_type", jnp.int32), jnp.floating):
            options["preferred_element_type"] = jnp.float32
    return Problem(problem.op, problem.title, problem.makers, options, problem.length)


@jax.jit
def deviation(got: jax.Array, want: jax.Array) -> jax.Array:
    """Largest error, relative to the largest magnitude of its row, or the root mean square of all where that is more.

    Infinite where one is finite and the other is not; for integers 1 where any differs.
    """
    if not jnp.issubdtype(got.dtype, jnp.floating):
        return jnp.any(got != want).astype(jnp.float32)
    rounded, got, want = (x.astype(jnp.float32) for x in (want.astype(got.dtype), got, want))
    finite = jnp.isfinite(got) & jnp.isfinite(rounded)
    same = (got == rounded) | (jnp.isnan(got) & jnp.isnan(rounded))
    size = jnp.where(finite, jnp.abs(want), 0.0)
    row = size.max(-1, keepdims=True) if size.ndim else size
    scale = jnp.maximum(row, jnp.sqrt(jnp.mean(jnp.square(size))))
    error = jnp.where(finite, jnp.abs(got - want), jnp.where(same, 0.0, jnp.inf))
    return jnp.max(jnp.where(error == 0, 0.0, error / scale))


def _same_bits(one: jax.Array, other: jax.Array) -> bool:
    return bool(jnp.array_equal(one, other, equal_nan=jnp.issubdtype(one.dtype, jnp.floating)))


def _named(tree: Any) -> list[tuple[str, jax.Array]]:
    return [(jax.tree_util.keystr(path) or "out", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]

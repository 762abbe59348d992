"""The dense ops on a CPU: the interpreted kernels and the reference path against jitted plain `jnp`.

    python benchmarks/dense_cpu.py [--only add,matmul,matmul_grad,reduce,vmap,trace] [--rounds 15] [--json timings.json]

`trace` times tracing alone, of the op through a handle against the bare `jnp` function.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from side_by_side import Timing, save, side_by_side, table

from opmux import registry

Function = Callable[..., Any]
Row = tuple[str, Function, str, dict[str, Any], tuple[Any, ...]]


def array(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.randint(jax.random.key(0), shape, -128, 128, dtype)
    return jax.random.normal(jax.random.key(sum(shape)), shape).astype(dtype)


def adds() -> Iterator[Row]:
    for name, x, y in (
        ("8 x 8", (8, 8), (8, 8)),
        ("1024 x 1024", (1024, 1024), (1024, 1024)),
        ("1024 x 1 + 1 x 1024", (1024, 1), (1, 1024)),
        ("odd 1023 x 777", (1023, 777), (1023, 777)),
        ("4096 x 4096", (4096, 4096), (4096, 4096)),
    ):
        yield f"add {name}", jnp.add, "add", {}, (array(*x), array(*y))


def products() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    for size in (64, 512, 1024):
        yield f"{size}³", (array(size, size), array(size, size)), {}
    yield "batch 8 x 256³", (array(8, 256, 256), array(8, 256, 256)), {}
    yield "weights 8 x 256 x 384 by 384 x 384", (array(8, 256, 384), array(384, 384)), {}
    yield "1 x 4096 by 4096²", (array(1, 4096), array(4096, 4096)), {}
    yield "odd 100 x 200 x 300", (array(100, 200), array(200, 300)), {}
    yield "bfloat16 512³", (array(512, 512, dtype=jnp.bfloat16), array(512, 512, dtype=jnp.bfloat16)), {}
    bytes_ = array(256, 256, dtype=jnp.int8)
    yield "int8 256³ to int32", (bytes_, bytes_), {"preferred_element_type": jnp.int32}


def matmuls() -> Iterator[Row]:
    for name, arrays, options in products():
        yield f"matmul {name}", jnp.matmul, "matmul", options, arrays


def reductions() -> Iterator[Row]:
    square, wide = array(1024, 1024), array(64, 65536)
    for kind, plain in (("sum", jnp.sum), ("max", jnp.max), ("mean", jnp.mean)):
        for axis in (0, 1, None):
            yield f"reduce {kind} 1024² axis {axis}", plain, "reduce", {"kind": kind, "axis": axis}, (square,)
        yield f"reduce {kind} 64 x 65536", plain, "reduce", {"kind": kind, "axis": 1}, (wide,)
    yield "reduce sum 64³ axes 0 and 2", jnp.sum, "reduce", {"axis": (0, 2)}, (array(64, 64, 64),)
    yield "reduce sum 128 x 32 x 16 x 64 axes 1 and 3", jnp.sum, "reduce", {"axis": (1, 3)}, (array(128, 32, 16, 64),)
    yield "reduce sum 8 x 8", jnp.sum, "reduce", {"axis": 1}, (array(8, 8),)
    half = square.astype(jnp.bfloat16)
    yield "reduce sum bfloat16 1024²", jnp.sum, "reduce", {"axis": 1}, (half,)


def batches() -> Iterator[Row]:
    x, y = array(64, 128, 128), array(64, 128, 128)
    for name, plain, options, arrays in (
        ("add", jnp.add, {}, (x, y)),
        ("matmul", jnp.matmul, {}, (x, y)),
        ("reduce", jnp.sum, {"axis": 1}, (x,)),
    ):
        yield f"vmap {name} 64 x 128²", plain, name, options, arrays


GROUPS = {"add": adds, "matmul": matmuls, "reduce": reductions, "vmap": batches}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="add,matmul,matmul_grad,reduce,vmap,trace", help="groups to run")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="where to write the timings")
    options = parser.parse_args()
    timings: list[Timing] = []
    for group in options.only.split(","):
        if group == "trace":
            rows = [row for of in GROUPS.values() for row in list(of())[:1] if of is not batches]
        else:
            rows = list(matmuls() if group == "matmul_grad" else GROUPS[group]())
        for row in rows:
            found = measure(row, group, options.rounds)
            print(table(found), flush=True)
            timings += found
    if options.json:
        save(options.json, timings)


def measure(row: Row, group: str, rounds: int) -> list[Timing]:
    name, plain, op, options, arrays = row
    plain_options = {key: value for key, value in options.items() if key != "kind"}
    functions: dict[str, Function] = {"jnp": lambda *arrays: plain(*arrays, **plain_options)}
    for backend in ("xla", "interpret"):
        run = registry.get(op, backend=backend)
        functions[backend] = lambda *arrays, run=run: run(*arrays, **options)
    if group == "matmul_grad":
        if not jnp.issubdtype(arrays[0].dtype, jnp.floating):
            return []
        functions = {key: gradient(function) for key, function in functions.items()}
        name += " forward+backward"
    if group == "trace":
        calls = {key: lambda function=function: trace(function, arrays) for key, function in functions.items()}
        return side_by_side(f"trace {op}", calls, rounds=rounds, inner=20)
    if group == "vmap":
        functions = {key: jax.vmap(function) for key, function in functions.items()}
    compiled = {key: jax.jit(function) for key, function in functions.items()}
    calls = {key: lambda run=run: run(*arrays) for key, run in compiled.items()}
    work = max(leaf.size for leaf in arrays) * (arrays[0].shape[-1] if op == "matmul" else 1)
    return side_by_side(name, calls, rounds=rounds, inner=max(1, min(200, 2**24 // (work + 1))), seconds=6)


def gradient(function: Function) -> Function:
    return jax.grad(lambda *arrays: (function(*arrays).astype(jnp.float32) ** 2).sum(), argnums=(0, 1))


def trace(function: Function, arrays: tuple[Any, ...]) -> None:
    """Traces a function that JAX has not seen: a cache would answer for one that it has."""
    jax.make_jaxpr(lambda *arrays: function(*arrays))(*arrays)


if __name__ == "__main__":
    main()

"""`chunk_fwd_h` on a CPU: the interpreted kernels against the plain `jax.numpy` reference, both jitted.

    python benchmarks/chunk_fwd_h_cpu.py [--rounds 15] [--seconds 20] [--json FILE]

Forward alone, and forward with the gradients of every operand. Ratios are to the reference of the same run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import Timing, save, side_by_side, table, temporary_bytes

from opmux import registry

BACKENDS = ("xla", "interpret")
PACKED = (0, 1000, 1010, 1010, 3000, 4096)

# name: (B, T, H, K, V), gates, dtype, options
SHAPES: dict[str, tuple[tuple[int, ...], tuple[str, ...], str, dict[str, Any]]] = {
    "gk, K=V=64": ((1, 4096, 4, 64, 64), ("gk",), "float32", {}),
    "gk raw, K=V=64": ((1, 4096, 4, 64, 64), ("gk",), "float32", {"gates": "raw"}),
    "gk, K=V=128": ((1, 4096, 4, 128, 128), ("gk",), "float32", {}),
    "gk, K=V=128, bfloat16": ((1, 4096, 4, 128, 128), ("gk",), "bfloat16", {}),
    "g and g_gamma, K=V=64": ((1, 4096, 4, 64, 64), ("g", "g_gamma"), "float32", {}),
    "gk, batch of 8, odd length": ((8, 509, 4, 64, 64), ("gk",), "float32", {}),
    "gk, split_size 256": ((1, 4096, 4, 64, 64), ("gk",), "float32", {"split_size": 256}),
    "gk, packed": ((1, 4096, 4, 64, 64), ("gk",), "float32", {"cu_seqlens": np.asarray(PACKED, np.int32)}),
    "gk, short": ((2, 100, 2, 32, 32), ("gk",), "float32", {}),
}


def operands(sizes: tuple[int, ...], gates: tuple[str, ...], dtype: str) -> dict[str, jax.Array]:
    """Normal keys and values, and gates that forget over some twenty tokens."""
    B, T, H, K, V = sizes
    rng = np.random.default_rng(0)
    shapes = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, K), "gv": (B, T, H, V)}
    arrays = {name: jnp.asarray(-0.1 * rng.random(shapes[name]), jnp.float32) for name in gates}
    arrays["k"] = jnp.asarray(rng.standard_normal((B, T, H, K)), dtype)
    arrays["v"] = jnp.asarray(rng.standard_normal((B, T, H, V)), dtype)
    return arrays


def functions(options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Jitted forward, and jitted forward with gradients, by backend."""

    def forward(op: Any) -> Callable[[dict[str, jax.Array]], Any]:
        return jax.jit(lambda arrays: op(**arrays, output_final_state=True, **options))

    def both(op: Any) -> Callable[[dict[str, jax.Array]], Any]:
        def loss(arrays: dict[str, jax.Array]) -> jax.Array:
            h, ht = op(**arrays, output_final_state=True, **options)
            return jnp.sum(jnp.square(h.astype(jnp.float32))) + jnp.sum(jnp.square(ht))

        return jax.jit(jax.value_and_grad(loss))

    ops = {backend: registry.get("chunk_fwd_h", backend=backend) for backend in BACKENDS}
    return {
        "forward": {backend: forward(op) for backend, op in ops.items()},
        "forward and backward": {backend: both(op) for backend, op in ops.items()},
    }


def measure(rounds: int, seconds: float) -> list[Timing]:
    """Every shape, forward and backward; the reference is the baseline of each group."""
    timings: list[Timing] = []
    for name, (sizes, gates, dtype, options) in SHAPES.items():
        arrays = operands(sizes, gates, dtype)
        for what, jitted in functions(options).items():
            thunks = {backend: lambda f=f, arrays=arrays: f(arrays) for backend, f in jitted.items()}
            rows = side_by_side(f"{name}: {what}", thunks, rounds=rounds, seconds=seconds)
            timings += [replace(row, temporary_bytes=temporary_bytes(jitted[row.name], arrays)) for row in rows]
    return timings


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="chunk_fwd_h on a CPU: interpreted kernels against the reference.")
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each function, at most (default: 15)")
    parser.add_argument("--seconds", type=float, default=20, help="time for a group (default: 20)")
    parser.add_argument("--json", metavar="FILE", help="also write the timings to a file")
    chosen = parser.parse_args(argv)
    timings = measure(chosen.rounds, chosen.seconds)
    print(table(timings))
    if chosen.json:
        save(chosen.json, timings)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Attention on a CPU: opmux's own choice against jitted `jax.nn.dot_product_attention`, and PyTorch if installed.

Run `python benchmarks/attention_cpu.py [--only long,short] [--json timings.json]`.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from side_by_side import Timing, save, side_by_side, table, temporary_bytes

from opmux import registry


@dataclass(frozen=True)
class Problem:
    B: int = 1
    T: int = 2048
    S: int | None = None
    N: int = 8
    K: int | None = None
    H: int = 64
    dtype: Any = jnp.float32
    causal: bool = False
    grad: bool = False

    @property
    def name(self) -> str:
        words = [f"B{self.B} T{self.T}", f"S{self.S}" if self.S else "", f"N{self.N}", f"K{self.K}" if self.K else ""]
        words += [f"H{self.H}", np.dtype(self.dtype).name, "causal" if self.causal else "full"]
        return " ".join(filter(None, words)) + (" forward+backward" if self.grad else " forward")

    def arrays(self) -> list[jax.Array]:
        S, K = self.S or self.T, self.K or self.N
        shapes = ((self.B, self.T, self.N, self.H), (self.B, S, K, self.H), (self.B, S, K, self.H))
        keys = jax.random.split(jax.random.key(0), 3)
        return [jax.random.normal(key, shape).astype(self.dtype) for key, shape in zip(keys, shapes, strict=True)]


GROUPS = {
    "long": [Problem(T=T, causal=c, grad=g) for T in (2048, 4096) for c in (False, True) for g in (False, True)],
    "short": [
        Problem(T=T, causal=c, grad=g) for T in (16, 64, 128, 256, 512) for c in (False, True) for g in (False, True)
    ],
    "odd": [Problem(T=T, causal=c) for T in (17, 131, 601, 1003) for c in (False, True)],
    "batch": [Problem(B=8, T=64, causal=True), Problem(B=8, T=64, grad=True), Problem(B=4, T=256), Problem(B=4, T=33)],
    "bfloat16": [Problem(T=T, dtype=jnp.bfloat16, causal=c) for T in (64, 512, 2048) for c in (False, True)],
    "heads": [
        Problem(T=1024, N=32, K=4, causal=True), Problem(T=1024, N=1), Problem(T=512, H=128), Problem(T=1, S=2048),
        Problem(T=128, S=2048, causal=True), Problem(T=2048, S=128),
    ],
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups to run, of: " + ", ".join(GROUPS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", help="where to write the timings")
    options = parser.parse_args()
    rows: list[Timing] = []
    for group in options.only.split(","):
        for problem in GROUPS[group]:
            found = side_by_side(problem.name, dict(contenders(problem)), rounds=options.rounds, inner=repeats(problem))
            found = [replace(row, temporary_bytes=memory(problem, row.name)) for row in found]
            print(table(found), flush=True)
            rows += found
    if options.json:
        save(options.json, rows)


def repeats(problem: Problem) -> int:
    """Calls in one measurement, so that it takes milliseconds."""
    return max(1, 2**18 // (problem.B * problem.T * (problem.S or problem.T)))


def functions(problem: Problem) -> dict[str, Callable[..., Any]]:
    def stock(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(q, k, v, is_causal=problem.causal)

    def chosen(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return registry.get("attention")(q, k, v, is_causal=problem.causal)

    def loss(run: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.grad(lambda *arrays: (run(*arrays).astype(jnp.float32) ** 2).sum(), argnums=(0, 1, 2))

    both = {"jax.nn": stock, "opmux": chosen}
    return {name: jax.jit(loss(run) if problem.grad else run) for name, run in both.items()}


def memory(problem: Problem, name: str) -> int | None:
    run = functions(problem).get(name)
    return None if run is None else temporary_bytes(run, *problem.arrays())


def contenders(problem: Problem) -> Iterator[tuple[str, Callable[[], Any]]]:
    arrays = problem.arrays()
    for name, run in functions(problem).items():
        yield name, lambda run=run: run(*arrays)
    if problem.dtype == jnp.float32 and importlib.util.find_spec("torch"):
        yield "torch", torch_attention(importlib.import_module("torch"), problem, arrays)


def torch_attention(torch: Any, problem: Problem, arrays: list[jax.Array]) -> Callable[[], Any]:
    q, k, v = (torch.from_numpy(np.array(array)).transpose(1, 2) for array in arrays)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=problem.causal, enable_gqa=problem.K is not None
        )

    def call() -> Any:
        if not problem.grad:
            with torch.no_grad():
                forward(q, k, v)
            return 0
        leaves = [array.detach().requires_grad_() for array in (q, k, v)]
        (forward(*leaves) ** 2).sum().backward()
        return 0

    return call


if __name__ == "__main__":
    main()

"""What the registry costs on top of JAX: warm calls, `get`, eager attention, tracing, import.

Every figure is a ratio of two things timed in turns in this run.

    python benchmarks/dispatch.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from opmux import registry
from opmux.core.config import NoConfig
from opmux.core.ops import builtin_ops


def in_turns(candidates: dict[str, Callable[[], Any]], calls: int, rounds: int = 60) -> dict[str, float]:
    """Least seconds a call of each candidate, measured in turns."""
    best = dict.fromkeys(candidates, float("inf"))
    for run in candidates.values():
        run()
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            for _ in range(calls):
                run()
            best[name] = min(best[name], (time.perf_counter() - start) / calls)
    return best


def warm_call() -> dict[str, float]:
    """`registry.get("add")(x, y)` on 8 by 8 against the same function under `jax.jit`."""
    x = jnp.ones((8, 8))
    direct = jax.jit(lambda x, y: x + y)
    return in_turns(
        {
            "direct": lambda: direct(x, x),
            "get_and_call": lambda: registry.get("add")(x, x),
            "get": lambda: registry.get("add"),
        },
        calls=500,
    )


def eager_attention() -> dict[str, float]:
    """Eager attention on (1, 64, 4, 32) against eager `jax.nn.dot_product_attention`."""
    q = jax.random.normal(jax.random.key(0), (1, 64, 4, 32))
    attention = registry.get("attention")
    return in_turns(
        {
            "jax.nn": lambda: jax.block_until_ready(jax.nn.dot_product_attention(q, q, q)),
            "opmux": lambda: jax.block_until_ready(attention(q, q, q)),
        },
        calls=5,
    )


def inside_jit() -> dict[str, float]:
    """A user's jitted function that calls the handle, against one that calls the chosen kernel."""
    x = jnp.ones((8, 8))
    through = jax.jit(lambda x: registry.get("add")(x, x) * 2)
    direct = jax.jit(lambda x: (x + x) * 2)
    return in_turns({"direct": lambda: direct(x), "opmux": lambda: through(x)}, calls=500)


def tracing() -> dict[str, float]:
    """Tracing a function that calls the handle, against tracing the chosen kernel with its canonical operands.

    CPython keeps its frames in chunks of 16 KiB, and a loop whose calls cross the end of a chunk allocates one at every
    call: the same trace takes up to 1.6 times as long at one depth of the stack as at another. So both are traced at
    depths over more than a chunk, and their means compared.
    """
    q = jax.random.normal(jax.random.key(0), (1, 64, 4, 32))
    op = builtin_ops()["attention"]
    chosen = registry.explain("attention", q, q, q).backend
    [implementation] = [found for found in registry.implementations("attention") if found.backend == chosen]
    kernel = implementation.load()
    call = op.call((q, q, q), {})
    make = implementation.default_config
    from opmux.core.devices import device

    config = NoConfig() if make is None else make(call.request, device("cpu"))
    handle = registry.get("attention")

    def deeper(depth: int, run: Callable[..., Any], *args: Any) -> Any:
        return deeper(depth - 1, run, *args) if depth else run(*args)

    def fresh(run: Callable[..., Any], depth: int) -> Callable[[], Any]:
        def trace() -> Any:
            jax.clear_caches()
            return jax.jit(lambda *args: deeper(depth, run, *args)).trace(q, q, q)

        return trace

    runs: dict[str, Callable[..., Any]] = {
        "chosen": lambda q, k, v: kernel(call.request, {"query": q, "key": k, "value": v}, config),
        "opmux": lambda q, k, v: handle(q, k, v),
    }
    depths = range(0, 128, 8)
    seconds = in_turns(
        {f"{name} {depth}": fresh(run, depth) for depth in depths for name, run in runs.items()}, calls=1, rounds=12
    )
    return {name: statistics.mean(seconds[f"{name} {depth}"] for depth in depths) for name in runs}


_IMPORT = """
import time
import jax, jax.numpy, numpy
start = time.perf_counter()
import opmux.registry
print(time.perf_counter() - start)
"""


def importing(rounds: int = 9) -> dict[str, float]:
    """Seconds that `import opmux.registry` adds to `import jax`, in fresh processes."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "HOME": home, "XDG_CACHE_HOME": home}
        command = [sys.executable, "-c", _IMPORT]
        seconds = [
            float(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
            for _ in range(rounds)
        ]
        assert not list(Path(home).iterdir()), "importing opmux.registry created files"
    return {"least": min(seconds), "median": statistics.median(seconds)}


def main(argv: list[str] | None = None) -> None:
    """Prints a table of ratios and the limits they should keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    warm, eager, jitted, traced, imported = warm_call(), eager_attention(), inside_jit(), tracing(), importing()
    rows = [
        ("warm get(add)(x, y) / jitted add", warm["get_and_call"] / warm["direct"], "<= 1.5"),
        ("get alone, us", warm["get"] * 1e6, "< 1.5"),
        ("eager attention / eager jax.nn", eager["opmux"] / eager["jax.nn"], "<= 0.1"),
        ("inside jit / direct", jitted["opmux"] / jitted["direct"], "1.00"),
        ("trace / trace of chosen kernel", traced["opmux"] / traced["chosen"], "<= 1.25"),
        ("import over jax, ms (median)", imported["median"] * 1e3, "<= 150"),
    ]
    print(f"JAX {jax.__version__}, Python {sys.version.split()[0]}")
    for name, value, limit in rows:
        print(f"{name:<36} {value:>9.3f}   {limit}")
    if options.json:
        facts = {"date": date.today().isoformat(), "python": sys.version.split()[0], "jax": jax.__version__}
        options.json.write_text(json.dumps({**facts, **{name: value for name, value, _ in rows}}, indent=1) + "\n")


if __name__ == "__main__":
    main()

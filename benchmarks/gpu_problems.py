"""What `gpu.py` runs: calls whose numerics are checked, and calls that are timed.

Each comes in the size of a GPU, and in one that a simulator on a CPU can do. `tier` orders them: when time is short,
those of the higher tiers are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Direction = Literal["forward", "backward"]
Maker = Callable[[jax.Array], jax.Array]

BF16, F16, F32, I8, I32, F8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.int32, jnp.float8_e4m3fn
BOTH: tuple[Direction, ...] = ("forward", "backward")
FORWARD: tuple[Direction, ...] = ("forward",)
BACKWARD: tuple[Direction, ...] = ("backward",)


@dataclass(frozen=True)
class Problem:
    """One call of an op.

    Attributes:
      op: name of the op.
      title: what tells it apart from the others of the op.
      makers: array arguments by name: what makes each of them from a random key.
      options: the other arguments.
      length: terms of the longest sum.
      tolerance: relative tolerance in place of that of the dtypes.
      tier: 0 for what must be run.
      directions: what is run of it.
    """

    op: str
    title: str
    makers: Mapping[str, Maker]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    length: int = 1
    tolerance: float | None = None
    tier: int = 0
    directions: tuple[Direction, ...] = BOTH

    def arrays(self) -> dict[str, jax.Array]:
        """The array arguments, the same ones every time."""
        keys = jax.random.split(jax.random.key(0), len(self.makers))
        return {name: jax.jit(make)(key) for (name, make), key in zip(self.makers.items(), keys, strict=True)}


def normal(*shape: int, dtype: Any = F32) -> Maker:
    """Normal numbers, or integers of eight bits."""

    def make(key: jax.Array) -> jax.Array:
        if jnp.issubdtype(dtype, jnp.integer):
            return jax.random.randint(key, shape, -128, 128, dtype=I32).astype(dtype)
        return jax.random.normal(key, shape, F32).astype(dtype)

    return make


def add(x: tuple[int, ...], y: tuple[int, ...], dtype: Any, **rest: Any) -> Problem:
    title = f"{_name(dtype)} {_sizes(x)}" + ("" if x == y else f" + {_sizes(y)}")
    return Problem("add", title, {"x": normal(*x, dtype=dtype), "y": normal(*y, dtype=dtype)}, **rest)


def reduce(kind: str, shape: tuple[int, ...], axis: int | None, dtype: Any, **rest: Any) -> Problem:
    title = f"{kind} {_name(dtype)} {_sizes(shape)} axis {axis}"
    length = int(np.prod(shape)) if axis is None else shape[axis]
    # Products of many normal numbers vanish: factors near one instead.
    maker = normal(*shape, dtype=dtype)
    if kind == "prod":
        maker = lambda key: jax.random.uniform(key, shape, F32, 0.9, 1.1).astype(dtype)  # noqa: E731
    return Problem("reduce", title, {"x": maker}, {"kind": kind, "axis": axis}, length=length, **rest)


def matmul(
    m: int, n: int, k: int, dtype: Any, *, batch: tuple[int, ...] = (), tolerance: float | None = None, tier: int = 0,
    directions: tuple[Direction, ...] = BOTH, **options: Any,
) -> Problem:  # fmt: skip
    title = " ".join([_name(dtype), *([f"{_sizes(batch)} of"] if batch else []), f"{m}x{n}x{k}"])
    title += "".join(f" {_name(option)}" for option in options.values())
    makers = {"a": normal(*batch, m, k, dtype=dtype), "b": normal(*batch, k, n, dtype=dtype)}
    return Problem("matmul", title, makers, options, k, tolerance, tier, directions)


def attention(
    words: str, B: int, T: int, N: int, H: int, *, S: int | None = None, K: int | None = None, Hv: int | None = None,
    dtype: Any = BF16, tier: int = 0, directions: tuple[Direction, ...] = BOTH,
    makers: Mapping[str, Maker] | None = None, **options: Any,
) -> Problem:  # fmt: skip
    S, K, Hv = S or T, K or N, Hv or H
    sizes = [f"B{B} T{T}", *([f"S{S}"] if S != T else []), f"N{N}", *([f"K{K}"] if K != N else []), f"H{H}"]
    title = " ".join([_name(dtype), *sizes, *([f"Hv{Hv}"] if Hv != H else []), words])
    arrays = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, Hv)}
    made = {name: normal(*shape, dtype=dtype) for name, shape in arrays.items()}
    return Problem("attention", title, {**made, **(makers or {})}, options, S, None, tier, directions)


def chunk_fwd_h(
    words: str, B: int, T: int, H: int, K: int, V: int, gates: tuple[str, ...] = (), *, dtype: Any = BF16,
    tier: int = 0, directions: tuple[Direction, ...] = BOTH, **options: Any,
) -> Problem:  # fmt: skip
    title = " ".join(filter(None, [_name(dtype), f"B{B} T{T} H{H} K{K} V{V}", words or "+".join(gates)]))
    shapes = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, K), "gv": (B, T, H, V), "h0": (B, H, K, V)}
    makers = {"k": normal(B, T, H, K, dtype=dtype), "v": normal(B, T, H, V, dtype=dtype)}
    # Raw gates that forget over some twenty tokens: they are as valid as cumulative ones, and no less work.
    makers |= {name: normal(*shapes[name]) if name == "h0" else _gate(shapes[name]) for name in gates}
    return Problem("chunk_fwd_h", title, makers, {"gates": "raw", **options}, T, None, tier, directions)


def _gate(shape: tuple[int, ...]) -> Maker:
    return lambda key: -0.1 * jax.random.uniform(key, shape, F32)


def _name(value: Any) -> str:
    return value if isinstance(value, str) else jnp.dtype(value).name


def _sizes(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))

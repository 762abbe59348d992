"""Whom the kernels are timed against: XLA with cuBLAS, cuDNN, and the Pallas kernels that JAX brings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from gpu_problems import Direction, Problem

Arrays = Mapping[str, jax.Array]
Function = Callable[[Arrays], Any]


@dataclass(frozen=True)
class Variant:
    """One way to call a contender.

    Attributes:
      function: of the array arguments.
      words: its tuning.
      prepare: what is done to the array arguments beforehand, outside of the time.
    """

    function: Function
    words: str = ""
    prepare: Callable[[Arrays], Arrays] | None = None


@dataclass(frozen=True)
class Contender:
    """What is timed under one name: the fastest of its variants.

    Attributes:
      name: what the row says.
      variants: makes the variants; raises what is amiss with them.
      gpu: runs on GPUs only; it is traced, not run, where there is none.
    """

    name: str
    variants: Callable[[], list[Variant]]
    gpu: bool = False


def rivals(problem: Problem, direction: Direction, arrays: Arrays) -> Iterator[Contender]:
    """Everyone but opmux who can do a call."""
    options = problem.options
    halves = all(array.dtype in (jnp.bfloat16, jnp.float16) for array in arrays.values())
    if problem.op == "add":
        yield _plain("jnp.add", lambda arrays: jnp.add(arrays["x"], arrays["y"]))
    if problem.op == "reduce":
        plain = getattr(jnp, options["kind"])
        yield _plain(f"jnp.{options['kind']}", lambda arrays: plain(arrays["x"], axis=options["axis"]))
    if problem.op == "matmul":
        yield _plain("jnp.matmul", lambda arrays: jnp.matmul(arrays["a"], arrays["b"], **options))
        if direction == "forward" and halves and arrays["a"].ndim == 2:
            yield Contender("JAX hopper_matmul_mgpu", lambda: list(_hopper_matmul()), gpu=True)
    if problem.op == "attention":
        yield Contender("jax.nn cudnn", lambda: [Variant(_cudnn(options))], gpu=True)
        if set(options) <= {"is_causal"} and halves:
            variants = lambda: list(_attention_mgpu(bool(options.get("is_causal")), direction))  # noqa: E731
            yield Contender("JAX attention_mgpu", variants, gpu=True)


def _plain(name: str, function: Function) -> Contender:
    return Contender(name, lambda: [Variant(function)])


def _cudnn(options: Mapping[str, Any]) -> Function:
    def run(arrays: Arrays) -> jax.Array:
        return jax.nn.dot_product_attention(**arrays, **options, implementation="cudnn")

    return run


def _hopper_matmul() -> Iterator[Variant]:
    """JAX's kernel with tiles from the list that its own benchmark tries."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as theirs

    takes_addend = "c" in inspect.signature(theirs.matmul).parameters
    dimension = theirs.MatmulDimension
    # Two warpgroups share a tile, along M or along N.
    shapes = ((128, 128, dimension.N), (128, 128, dimension.M), (256, 64, dimension.N))
    for tile_m, tile_n, shared in shapes:
        for width in (8,) if tile_m == 256 else (4, 16):
            config = theirs.TuningConfig(
                tile_m=tile_m, tile_n=tile_n, tile_k=64, max_concurrent_steps=4, epi_tile_m=64, epi_tile_n=64,
                grid_minor_dim=dimension.M, grid_tile_width=width, wg_dimension=shared,
            )  # fmt: skip

            def run(arrays: Arrays, config: Any = config) -> Any:
                matmul: Callable[..., Any] = theirs.matmul
                pair = arrays["a"], arrays["b"]
                return matmul(*pair, None, config) if takes_addend else matmul(*pair, config)

            yield Variant(run, f"{tile_m}x{tile_n} by {shared}, width {width}")


def _attention_mgpu(causal: bool, direction: Direction) -> Iterator[Variant]:
    """JAX's kernel with blocks from the list that its own benchmark tries; it leaves the scale to the caller."""
    from jax.experimental.pallas.ops.gpu import attention_mgpu as theirs

    back = 64 if direction == "backward" else None
    for block_kv in (256, 128) if direction == "forward" else (128,):
        for groups in (1,) if direction == "forward" else (1, 2):
            config = theirs.TuningConfig(
                block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=causal, compute_wgs_bwd=groups,
                block_q_dkv=back, block_kv_dkv=back, block_q_dq=back, block_kv_dq=back,
            )  # fmt: skip

            def run(arrays: Arrays, config: Any = config) -> Any:
                return theirs.attention(arrays["query"], arrays["key"], arrays["value"], config)

            words = f"block_kv {block_kv}" if direction == "forward" else f"{groups} warpgroups"
            yield Variant(run, f"float16, {words}", _scaled_halves)


def _scaled_halves(arrays: Arrays) -> Arrays:
    """What JAX's kernel takes: a scaled query, and float16 whatever its checks say."""
    wide = {name: array.astype(jnp.float32) for name, array in arrays.items()}
    wide["query"] *= wide["query"].shape[-1] ** -0.5
    return {name: array.astype(jnp.float16) for name, array in wide.items()}

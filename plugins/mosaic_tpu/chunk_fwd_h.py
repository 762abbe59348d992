"""`chunk_fwd_h` as Mosaic TPU kernels: this one for sequences of one length, `chunk_fwd_h_packed` for packed ones.

Steps along the chunks of a sequence run one after another; everything comes and goes block by block, and the state
of the heads of a step stays in vector memory:

    h0 [bh, K, bv] ──► state [bh, K, bv] ──────────────────────────────────► ht [bh, K, bv]
                        │            ▲                         after the last chunk
                        ▼            │  decayed, plus the chunk's keys and values
    h [bh, K, bv] ◄── as stored      │
                                     └── k [bt, bh, K], v [bt, bh, bv], gates
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core import compat
from opmux.core.config import Config
from opmux.core.ops.chunk_states import outputs, without_tokens
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import Sizes, kernel_dtype
from opmux.plugins.mosaic_tpu.chunk_fwd_h_config import ChunkFwdHConfig
from opmux.plugins.mosaic_tpu.chunk_fwd_h_gates import Window, pick_scalar_gates, scalar_exponents
from opmux.plugins.mosaic_tpu.chunk_fwd_h_heads import copy_heads, for_heads
from opmux.plugins.mosaic_tpu.chunk_fwd_h_packed import packed_states
from opmux.plugins.mosaic_tpu.chunk_fwd_h_step import chunk_of, chunk_scratch


def chunk_fwd_h(request: Request, operands: Operands, config: Config) -> Outputs:
    """The states before the splits and after each sequence.

    Args:
      request: a request of `chunk_fwd_h`.
      operands: its canonical operands.
      config: a `ChunkFwdHConfig`.
    """
    config = cast(ChunkFwdHConfig, config)
    trivial = without_tokens(request, operands)
    if trivial is not None:
        return trivial
    sizes = Sizes.of(request, config.block_tokens, config.block_heads, config.block_values, config.num_interleaved)
    specs = outputs(request)
    stored = kernel_dtype(specs["h"].dtype)
    found = states(loadable(operands), sizes, stored, "ht" in request.wanted, config.vmem_limit_bytes)
    return {name: array.astype(specs[name].dtype) for name, array in found.items()}


def loadable(operands: Operands) -> dict[str, jax.Array]:
    """Operands that vary over the same axes of a `shard_map`, in dtypes that Mosaic loads."""
    found = {name: compat.vary_like(array, operands.values()) for name, array in operands.items()}
    return {name: array.astype(kernel_dtype(array.dtype)) for name, array in found.items()}


def states(operands: Operands, sizes: Sizes, stored: Any, final: bool, vmem_limit: int) -> Outputs:
    """The states.

    Args:
      operands: canonical operands that Mosaic loads.
      sizes: sizes of the steps.
      stored: dtype of `h`.
      final: whether `ht` is wanted too.
      vmem_limit: bytes of vector memory that the kernel may use.

    Returns:
      `h` [B, num_splits, H, K, V] in `stored`, and `ht` [N, H, K, V] in float32.
    """
    run = packed_states if "cu_seqlens" in operands else _fixed_states
    return run(operands, sizes, stored, final, vmem_limit)


def _fixed_states(operands: Operands, sizes: Sizes, stored: Any, final: bool, vmem_limit: int) -> Outputs:
    inputs = {name: operands[name] for name in ("k", "v", "gk", "gv", "h0") if name in operands}
    scalar_gates = pick_scalar_gates(operands)
    if scalar_gates:
        inputs["scalars"] = scalar_exponents(scalar_gates, sizes, None)
    B, H, K, V = sizes.B, sizes.H, sizes.K, sizes.V
    like = jax.typeof(inputs["k"]).manual_axis_type
    shapes = {"h": jax.ShapeDtypeStruct((B, sizes.num_splits, H, K, V), stored, manual_axis_type=like)}
    if final:
        shapes["ht"] = jax.ShapeDtypeStruct((B, H, K, V), jnp.float32, manual_axis_type=like)
    chunks, T, bt = sizes.chunks, sizes.T, sizes.bt

    def kernel(refs: Mapping[str, Any], out: Mapping[str, Any], scratch: Mapping[str, Any]) -> None:
        chunk, state = pl.program_id(3), scratch["state"]

        @pl.when(chunk == 0)
        def _open() -> None:
            copy_heads(state, refs.get("h0"))

        window = Window() if T % bt == 0 else Window(jnp.int32(0), jnp.minimum(bt, T - chunk * bt))
        step = chunk_of(refs, scratch, window)
        if sizes.per_split > 1:

            @pl.when(lax.rem(chunk, jnp.int32(sizes.per_split)) == 0)
            def _store() -> None:
                copy_heads(out["h"], state)

        stored_here = out["h"] if sizes.per_split == 1 else None
        for_heads(sizes.bh, sizes.at_once, lambda head: step.advance(head, state, stored_here))

        if "ht" in out:

            @pl.when(chunk == chunks - 1)
            def _close() -> None:
                copy_heads(out["ht"], state)

    return pl.pallas_call(
        kernel,
        grid=(B, sizes.head_blocks, sizes.value_blocks, chunks),
        in_specs=[{name: block_spec(name, sizes) for name in inputs}],
        out_specs={name: block_spec(name, sizes) for name in shapes},
        out_shape=shapes,
        scratch_shapes=[{"state": pltpu.VMEM((sizes.bh, K, sizes.bv), jnp.float32), **chunk_scratch(inputs, sizes)}],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
            # Block indices are those of the grid, which is made of the shapes.
            disable_bounds_checks=True,
        ),
        name="chunk_fwd_h",
    )(inputs)


def block_spec(name: str, sizes: Sizes, *, backwards: bool = False) -> pl.BlockSpec:
    """The block of an array in a step (batch element, heads, value channels, chunk).

    Args:
      name: of the array; a cotangent has the block of what it is of, `states` are those before every chunk.
      sizes: sizes of the steps.
      backwards: steps along the chunks run from the last one to the first.
    """
    name = name.removeprefix("d_")
    bt, bh, K, bv = sizes.bt, sizes.bh, sizes.K, sizes.bv

    def at(step: Any) -> Any:
        return sizes.chunks - 1 - step if backwards else step

    if name in ("k", "gk"):
        return pl.BlockSpec((1, bt, bh, K), lambda b, h, v, c: (b, at(c), h, 0))
    if name in ("v", "gv"):
        return pl.BlockSpec((1, bt, bh, bv), lambda b, h, v, c: (b, at(c), h, v))
    if name == "scalars":
        return pl.BlockSpec((None, None, bh, bt + 1), lambda b, h, v, c: (b, at(c), h, 0))
    if name == "states" or (name == "h" and sizes.per_split == 1):
        return pl.BlockSpec((None, None, bh, K, bv), lambda b, h, v, c: (b, at(c), h, 0, v))
    if name == "h":
        return pl.BlockSpec(
            (None, None, bh, K, bv), lambda b, h, v, c: (b, lax.div(at(c), jnp.int32(sizes.per_split)), h, 0, v)
        )
    return pl.BlockSpec((None, bh, K, bv), lambda b, h, v, c: (b, h, 0, v))

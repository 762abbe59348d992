"""The backward of `chunk_fwd_h` as Mosaic TPU kernels: this one for sequences of one length.

Steps along the chunks run from the last one to the first, and the cotangent of the states of the heads of a step
stays in vector memory:

    d_ht [bh, K, V] ──► d_state [bh, K, V] ────────────────────────────────► d_h0 [bh, K, V]
                            │            ▲                   after the first chunk
                            │            │  decayed, plus d_h where the state was stored
                            ▼            │
            with k, v, gates, states: d_k, d_v, d_gates of the chunk

A gate decays the state before the chunk, so its cotangent needs that state in full: the stored one, where that was
stored before every chunk and not rounded, else the forward kernel is run once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core.config import Config
from opmux.core.op import forward_request
from opmux.core.ops.chunk_fwd_h import OP
from opmux.core.ops.chunk_index import max_rows
from opmux.core.ops.chunk_states import GATES, outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_tpu.chunk_fwd_h import block_spec, loadable, states
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import Sizes
from opmux.plugins.mosaic_tpu.chunk_fwd_h_config import ChunkFwdHVjpConfig
from opmux.plugins.mosaic_tpu.chunk_fwd_h_gates import Window, pick_scalar_gates, scalar_exponents
from opmux.plugins.mosaic_tpu.chunk_fwd_h_heads import copy_heads, for_heads, rows_scratch
from opmux.plugins.mosaic_tpu.chunk_fwd_h_step import chunk_of, chunk_scratch
from opmux.plugins.mosaic_tpu.chunk_fwd_h_vjp_packed import packed_cotangents
from opmux.plugins.mosaic_tpu.chunk_fwd_h_vjp_step import Pullback

CHANNELS = ("k", "v", "gk", "gv")


def chunk_fwd_h_vjp(request: Request, operands: Operands, config: Config) -> Outputs:
    """The cotangents of `request.wanted`.

    Args:
      request: a request of `chunk_fwd_h_vjp`.
      operands: the operands of the forward, its `h`, and `d_h`, `d_ht` or both.
      config: a `ChunkFwdHVjpConfig`.
    """
    config = cast(ChunkFwdHVjpConfig, config)
    if outputs(forward_request(OP, request))["h"].size == 0:
        return _without_tokens(request, operands)
    sizes = Sizes.of(request, config.block_tokens, config.block_heads, request["v"].shape[-1])
    given = loadable(operands)
    wanted = [name for name in request.wanted if name in CHANNELS or name == "h0"]
    if any(name in request.wanted for name in ("g", "g_gamma")):
        wanted.append("scalars")
    if any(name in request.wanted for name in GATES):
        given["states"] = _carried_states(given, sizes, config)
    run = packed_cotangents if "cu_seqlens" in request else _fixed_cotangents
    found = run(given, sizes, tuple(wanted), config.vmem_limit_bytes)
    return {name: found[name].astype(request[name].dtype) for name in request.wanted}


def _carried_states(operands: Operands, sizes: Sizes, config: ChunkFwdHVjpConfig) -> jax.Array:
    """The states before every chunk, never rounded, [B, R, H, K, V]."""
    if sizes.per_split == 1 and operands["h"].dtype == jnp.float32:
        return operands["h"]
    rows = sizes.chunks
    if "cu_seqlens" in operands:
        rows = min(max_rows(sizes.T, sizes.N, sizes.bt), sizes.num_splits * sizes.per_split)
    every = replace(sizes, per_split=1, num_splits=rows)
    return states(operands, every, jnp.float32, False, config.vmem_limit_bytes)["h"]


def _without_tokens(request: Request, operands: Operands) -> Outputs:
    """No token: what reaches the final states reaches the initial ones, and nothing else."""
    zeros = {name: jnp.zeros(request[name].shape, request[name].dtype) for name in request.wanted}
    if "h0" in zeros and "d_ht" in operands:
        zeros["h0"] = operands["d_ht"].astype(zeros["h0"].dtype)
    return zeros


def _fixed_cotangents(operands: Operands, sizes: Sizes, wanted: tuple[str, ...], vmem_limit: int) -> Outputs:
    """Cotangents by name; those of the scalar gates where `scalars` is wanted."""
    inputs = {name: operands[name] for name in (*CHANNELS, "states", "d_h", "d_ht") if name in operands}
    scalar_gates, pull_scalars = pick_scalar_gates(operands), None
    if scalar_gates:
        inputs["scalars"], pull_scalars = jax.vjp(lambda gates: scalar_exponents(gates, sizes, None), scalar_gates)
    like = jax.typeof(inputs["k"]).manual_axis_type
    shapes = {
        name: jax.ShapeDtypeStruct(array.shape, array.dtype, manual_axis_type=like)
        for name, array in {**operands, **inputs}.items()
        if name in wanted
    }
    d_shapes = {f"d_{name}": shape for name, shape in shapes.items()}
    scratch = {
        "d_state": pltpu.VMEM((sizes.bh, sizes.K, sizes.V), jnp.float32),
        **chunk_scratch(inputs, sizes),
        **rows_scratch(d_shapes, sizes, "d_"),
    }
    chunks, T, bt = sizes.chunks, sizes.T, sizes.bt

    def kernel(refs: Mapping[str, Any], out: Mapping[str, Any], scratch: Mapping[str, Any]) -> None:
        step, d_state = pl.program_id(3), scratch["d_state"]
        number = chunks - 1 - step

        @pl.when(step == 0)
        def _open() -> None:
            copy_heads(d_state, refs.get("d_ht"))

        window = Window() if T % bt == 0 else Window(jnp.int32(0), jnp.minimum(bt, T - number * bt))
        chunk = chunk_of(refs, scratch, window)
        whole = {name: ref.at[0] if name in CHANNELS else ref for name, ref in out.items()}
        gates = {name: refs[name].at[0] for name in ("gk", "gv") if name in refs}
        pullback = Pullback(chunk, gates, refs.get("states"), whole, scratch)

        def d_stored(*at: Any) -> jax.Array:
            return refs["d_h"][at].astype(jnp.float32)

        every = d_stored if "d_h" in refs and sizes.per_split == 1 else None
        pullback.retreat(sizes.bh, sizes.at_once, d_state, every)
        pullback.finish()

        if "d_h" in refs and sizes.per_split > 1:

            @pl.when(lax.rem(number, jnp.int32(sizes.per_split)) == 0)
            def _stored() -> None:
                def add(head: Any) -> None:
                    d_state[head] = d_state[head] + d_stored(head)

                for_heads(sizes.bh, 1, add)

        if "h0" in out:

            @pl.when(step == chunks - 1)
            def _close() -> None:
                copy_heads(out["h0"], d_state)

    found = pl.pallas_call(
        kernel,
        grid=(sizes.B, sizes.head_blocks, 1, chunks),
        in_specs=[{name: block_spec(name, sizes, backwards=True) for name in inputs}],
        out_specs={name: block_spec(name, sizes, backwards=True) for name in shapes},
        out_shape=shapes,
        scratch_shapes=[scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=vmem_limit,
            # Block indices are those of the grid, which is made of the shapes.
            disable_bounds_checks=True,
        ),
        name="chunk_fwd_h_vjp",
    )(inputs)
    if pull_scalars is not None and "scalars" in found:
        found |= pull_scalars(found["scalars"])[0]
    return found

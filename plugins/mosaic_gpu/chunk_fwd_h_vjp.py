"""The backward of `chunk_fwd_h` on Hopper.

d_h, d_ht ──► a walk from the last row to the first:  d_after[row] = d_state
                                                      d_state = decay * d_state + d_h[row]
    │                                                                    └──► d_h0, at the first row
    ▼
d_after [row]       cotangent of the state after each row
    │ with the weighed keys and values of the row, all rows at once
    ▼
d_k = d_after v,  d_v = k d_after
    │ times k and v, and with the stored states: cotangents of the logs of weights and factors
    ▼
d_g, d_g_gamma, d_gk, d_gv
"""

from __future__ import annotations

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.config import Config
from opmux.core.op import forward_request
from opmux.core.ops.chunk_fwd_h import OP
from opmux.core.ops.chunk_gates import decayed
from opmux.core.ops.chunk_index import scatter_rows
from opmux.core.ops.chunk_states import GATES, Rows, cut_rows, outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_gpu.chunk_fwd_h import first_rows, walk_of
from opmux.plugins.mosaic_gpu.chunk_fwd_h_config import ChunkFwdHConfig, on_tensor_cores, tokens_stages
from opmux.plugins.mosaic_gpu.chunk_fwd_h_sums import add_up
from opmux.plugins.mosaic_gpu.chunk_fwd_h_tiles import Decay, Layout, decay_of, factors_of, tiles_of
from opmux.plugins.mosaic_gpu.chunk_fwd_h_tokens import token_cotangents


def chunk_fwd_h_vjp(request: Request, operands: Operands, config: Config) -> Outputs:
    """The cotangents of `request.wanted`.

    Args:
      request: a request of `chunk_fwd_h_vjp`.
      operands: those of the forward, its `h`, and `d_h`, `d_ht` of its outputs.
      config: a `ChunkFwdHConfig`.
    """
    forward = forward_request(OP, request)
    if outputs(forward)["h"].size == 0:
        return _without_tokens(request, operands)
    walk = walk_of(request, cast(ChunkFwdHConfig, config), reverse=True)
    rows = cut_rows(forward, operands)
    gates = {name: rows.arrays[name] for name in GATES if name in rows.arrays}

    def decay_by(gates: dict[str, jax.Array]) -> Decay:
        return decay_of(forward, dataclasses.replace(rows, arrays={**rows.arrays, **gates}))

    decay, pull_gates = jax.vjp(decay_by, gates)
    wide = np.dtype(np.float32)
    dtype = request["k"].dtype if on_tensor_cores(request) else wide
    factors = {**factors_of(decay, walk.tile), **first_rows(request, operands)}
    d_after, d_h0 = add_up(
        walk, operands["d_h"], factors, operands.get("d_ht"), dtype, last="h0" in request.wanted,
        name="chunk_fwd_h_vjp",
    )  # fmt: skip

    found: dict[str, jax.Array] = {} if d_h0 is None else {"h0": d_h0}
    stages = tokens_stages(forward)
    if stages:
        layout = Layout.of(forward)
        arrays = tiles_of(forward, operands, layout, walk.tile)
        d_k, d_v = token_cotangents(arrays, d_after, walk.rows, layout.steps, stages, walk.config.num_ctas)
        if layout.in_place:
            T = request["k"].shape[1]
            cut = cut_rows(forward, {"k": d_k[:, :T], "v": d_v[:, :T]}).arrays
        else:
            cut = {"k": _rows(d_k, rows.arrays["k"]), "v": _rows(d_v, rows.arrays["v"])}
    else:
        cut = _products(decay, rows.arrays["k"].astype(wide), rows.arrays["v"].astype(wide), d_after.astype(wide))
    found |= cut
    if any(name in request.wanted for name in GATES):
        on_k, on_v = (rows.arrays[end].astype(wide) * cut[end].astype(wide) for end in ("k", "v"))
        d_state_k, d_state_v = _of_factors(decay, d_after.astype(wide) * operands["h"].astype(wide))
        d_decay = Decay(
            k=None if decay.k is None else on_k,
            v=None if decay.v is None else on_v,
            head=None if decay.head is None else on_k.sum(-1),
            state_k=d_state_k,
            state_v=d_state_v,
        )
        found |= pull_gates(d_decay)[0]
    for name in ("k", "v", "g", "gk", "gv"):
        if name in request.wanted:
            found[name] = _tokens(request, operands, rows, found[name]).astype(request[name].dtype)
    return {name: found[name] for name in request.wanted}


def _products(decay: Decay, k: jax.Array, v: jax.Array, d_after: jax.Array) -> dict[str, jax.Array]:
    """The cotangents of keys and values [B, R, S, H, ...] in float32, by XLA."""

    def weighed_k(array: jax.Array) -> jax.Array:
        return decayed(decayed(array, decay.k), None if decay.head is None else decay.head[..., None])

    highest = lax.Precision.HIGHEST
    d_k = jnp.einsum("brshv,brhkv->brshk", decayed(v, decay.v), d_after, precision=highest)
    d_v = jnp.einsum("brshk,brhkv->brshv", weighed_k(k), d_after, precision=highest)
    return {"k": weighed_k(d_k), "v": decayed(d_v, decay.v)}


def _rows(tokens: jax.Array, like: jax.Array) -> jax.Array:
    """Whole tiles [B, tokens, H, D] as the rows that they were made of, [B, R, S, H, D]."""
    B, R, S = like.shape[:3]
    return tokens.reshape(B, R, -1, *tokens.shape[2:])[:, :, :S]


def _of_factors(decay: Decay, moved: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """Cotangents of the factors of the state.

    Args:
      decay: the decay.
      moved: the cotangent of the state after each row times the state before it, [B, R, H, K, V].
    """
    by_k = moved if decay.state_k is None else moved * decay.state_k[..., :, None]
    by_v = moved if decay.state_v is None else moved * decay.state_v[..., None, :]
    d_k = d_v = None
    if decay.state_k is not None:
        d_k = by_v.sum(-1)
        if decay.state_k.shape[-1] == 1:  # a gate of the head alone
            d_k = d_k.sum(-1, keepdims=True)
    if decay.state_v is not None:
        d_v = by_k.sum(-2)
    return d_k, d_v


def _tokens(request: Request, operands: Operands, rows: Rows, array: jax.Array) -> jax.Array:
    """Rows [B, R, S, H, ...] as tokens [B, T, H, ...]."""
    T = request["k"].shape[1]
    if rows.table is not None:
        return scatter_rows(array, operands["cu_seqlens"], rows.table, T)
    return array.reshape(array.shape[0], -1, *array.shape[3:])[:, :T]


def _without_tokens(request: Request, operands: Operands) -> Outputs:
    """No token: what reaches the final states reaches the initial ones, and nothing else."""
    zeros = {name: jnp.zeros(request[name].shape, request[name].dtype) for name in request.wanted}
    if "h0" in zeros and "d_ht" in operands:
        zeros["h0"] = operands["d_ht"].astype(zeros["h0"].dtype)
    return zeros

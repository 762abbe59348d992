"""The backward of `chunk_fwd_h` as a portable Pallas kernel.

    d_h, d_ht ──► one split after another, the last one first:
                     d_after[split] = d_state;   d_state = decay * d_state + d_h[split]
        │                                │ ▲         │ times the state before the split
        │                                ▼ │         ▼
        │                               d_h0     cotangents of the decay of whole splits
        ▼
    d_after  [bs, bb, bh, K, V]                    cotangent of the state after each split
        │ with the decayed keys and values of a block of tokens
        ▼
    d_k = d_after v,  d_v = k d_after              [bb, bs * span, bh, ...]
        │ times k and v: cotangents of the exponents, whose sums over tokens are those of the gates
        ▼
    d_g, d_g_gamma, d_gk, d_gv

The block of `d_h0`, [bb, bh, K, V], is revisited by every step along the splits. A gate also decays the
state that a split starts from, so its cotangent needs that state: the stored one where that was stored as
it was carried, else the forward kernel is run once more.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.op import forward_request
from opmux.core.ops.chunk_fwd_h import OP
from opmux.core.ops.chunk_gates import Exponents, decayed, exponents
from opmux.core.ops.chunk_index import scatter_rows
from opmux.core.ops.chunk_states import GATES, ChunkParams, accumulator, outputs
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.interpret.chunk_fwd_h import chunk_fwd_h
from opmux.plugins.interpret.chunk_fwd_h_blocks import Blocks, token_rows
from opmux.plugins.interpret.chunk_fwd_h_config import ChunkFwdHConfig, ChunkFwdHVjpConfig


def chunk_fwd_h_vjp(request: Request, operands: Operands, config: ChunkFwdHVjpConfig) -> Outputs:
    """The cotangents of `request.wanted`."""
    forward = forward_request(OP, request)
    params: ChunkParams = request.params
    specs = outputs(forward)
    acc = specs["ht"].dtype
    if specs["h"].size == 0:
        return _without_tokens(request, operands)
    blocks = Blocks.of(request, config, reverse=True)
    inputs, table = token_rows(request, operands)
    inputs.update({name: operands[name] for name in ("d_h", "d_ht") if name in operands})
    wanted_gates = [name for name in GATES if name in request.wanted]
    if wanted_gates:
        inputs["h"] = _carried_states(forward, operands, config)

    tokens = [name for name in ("k", "v", "g", "gk", "gv") if name in request.wanted]
    shapes = {name: jax.ShapeDtypeStruct(inputs[name].shape, inputs[name].dtype) for name in tokens}
    shapes["h0"] = jax.ShapeDtypeStruct(specs["ht"].shape, acc)
    if "g_gamma" in wanted_gates:
        shapes["d_gamma"] = jax.ShapeDtypeStruct((blocks.grid[0], *request["g_gamma"].shape), acc)

    def kernel(refs: dict[str, Any], out: dict[str, Any]) -> None:
        batch, step = pl.program_id(0), pl.program_id(4)
        lengths = blocks.lengths(refs, batch, step)
        used = (lengths > 0)[:, :, None, None, None]

        @pl.when(step == 0)
        def start() -> None:
            d_h0 = out["h0"]
            d_h0[...] = jnp.zeros(d_h0.shape, acc)
            if "d_ht" in refs:
                # The constant gate sums over the batch, so what lies past its end must not enter.
                known = True if blocks.packed else used.any(1)
                d_h0[...] = jnp.where(known, refs["d_ht"][...], 0)
            if "d_gamma" in out:
                out["d_gamma"][...] = jnp.zeros(out["d_gamma"].shape, acc)

        rows = blocks.rows(refs, lengths, acc)

        def exponents_of(gates: dict[str, jax.Array]) -> Exponents:
            return exponents(gates, lengths, params.span, params.chunk, params.raw, blocks.full)

        decay, pull_gates = jax.vjp(exponents_of, {name: rows[name] for name in GATES if name in rows})
        states = {n: e for n, e in (("state_k", decay.state_k), ("state_v", decay.state_v)) if e is not None}
        factors = {name: jnp.exp(exponent) for name, exponent in states.items()}

        def retreat(i: jax.Array, found: tuple[jax.Array, dict[str, jax.Array]]) -> Any:
            d_after, d_states = found
            s = blocks.bs - 1 - i
            at = blocks.state_of(refs, s)
            here = lax.dynamic_index_in_dim(used, s, 1, keepdims=False)
            d_state = out["h0"][at]
            d_after = lax.dynamic_update_index_in_dim(d_after, d_state, s, 0)
            for factor in factors.values():
                d_state = d_state * lax.dynamic_index_in_dim(factor, s, 1, keepdims=False)
            if wanted_gates:
                state = jnp.where(here, refs["h"][:, pl.ds(s, 1)][:, 0], 0)
                d_states = {
                    name: lax.dynamic_update_index_in_dim(total, _summed_to(total[:, 0], d_state * state), s, 1)
                    for name, total in d_states.items()
                }
            if "d_h" in refs:
                d_state = d_state + jnp.where(here, refs["d_h"][:, pl.ds(s, 1)][:, 0].astype(acc), 0)
            out["h0"][at] = d_state
            return d_after, d_states

        shape = (blocks.bs, blocks.bb, blocks.bh, blocks.bk, blocks.bv)
        nothing = jnp.zeros(shape, acc), {name: jnp.zeros(exponent.shape, acc) for name, exponent in states.items()}
        d_after, d_states = lax.fori_loop(0, blocks.bs, retreat, nothing)

        k, v = decayed(rows["k"], decay.k), decayed(rows["v"], decay.v)
        d_k = jnp.einsum("brshv,rbhkv->brshk", v, d_after, precision=lax.Precision.HIGHEST)
        d_v = jnp.einsum("brshk,rbhkv->brshv", k, d_after, precision=lax.Precision.HIGHEST)

        def write(name: str, rows: jax.Array) -> None:
            out[name][...] = rows.reshape(out[name].shape).astype(out[name].dtype)

        if "k" in out:
            write("k", decayed(d_k, decay.k))
        if "v" in out:
            write("v", decayed(d_v, decay.v))
        if wanted_gates:
            d_decay = Exponents(
                k=None if decay.k is None else k * d_k,
                v=None if decay.v is None else _summed_to(decay.v, v * d_v),
                state_k=d_states.get("state_k"),
                state_v=d_states.get("state_v"),
            )
            (d_gates,) = pull_gates(d_decay)
            for name in wanted_gates:
                if name == "g_gamma":
                    out["d_gamma"][...] += d_gates[name][None]
                else:
                    write(name, d_gates[name])

    found = pl.pallas_call(
        kernel,
        grid=blocks.grid,
        in_specs=[{name: blocks.spec(name) for name in inputs}],
        out_specs={name: blocks.spec(name) for name in shapes},
        out_shape=shapes,
        interpret=True,
        name="chunk_fwd_h_vjp",
    )(inputs)
    if table is not None:
        length = request["k"].shape[1]
        for name in tokens:
            rows = found[name].reshape(1, params.num_splits, params.span, *found[name].shape[2:])
            found[name] = scatter_rows(rows, operands["cu_seqlens"], table, length)
    if "d_gamma" in found:
        found["g_gamma"] = found["d_gamma"].sum(0)
    return {name: found[name] for name in request.wanted}


def _summed_to(like: jax.Array, cotangent: jax.Array) -> jax.Array:
    """A cotangent summed over the axes along which a factor was broadcast."""
    narrow = [axis for axis, size in enumerate(like.shape) if size < cotangent.shape[axis]]
    return cotangent.sum(narrow, keepdims=True) if narrow else cotangent


def _carried_states(forward: Request, operands: Operands, config: ChunkFwdHVjpConfig) -> jax.Array:
    """The state before each split, never rounded."""
    if operands["h"].dtype == accumulator(forward["k"].dtype):
        return operands["h"]
    request = dataclasses.replace(
        forward, params=dataclasses.replace(forward.params, states_in_fp32=True), wanted=("h",)
    )
    whole = ChunkFwdHConfig(**config.model_dump(), block_k=forward["k"].shape[-1], block_v=forward["v"].shape[-1])
    return chunk_fwd_h(request, operands, whole)["h"]


def _without_tokens(request: Request, operands: Operands) -> Outputs:
    """No token: what reaches the final states reaches the initial ones, and nothing else."""
    zeros = {name: jnp.zeros(request[name].shape, request[name].dtype) for name in request.wanted}
    if "h0" in zeros and "d_ht" in operands:
        zeros["h0"] = operands["d_ht"].astype(zeros["h0"].dtype)
    return zeros

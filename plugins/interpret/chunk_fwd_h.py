"""`chunk_fwd_h` as a portable Pallas kernel.

    k, v, gates  [bb, bs * span, bh, ...]          a block of tokens: bs splits of `span` each
        │ decay to the end of the split
        │ k^T v of all splits at once
        ▼
    added  [bs, bb, bh, bk, bv]
        │ one split after another:   h[split] = state;   state = decay * state + added[split]
        ▼                                      │ ▲
    h  [bb, bs, bh, bk, bv]                    ▼ │
                                           ht  [bb, bh, bk, bv], revisited by every step along the splits

The state lives in the block of `ht`. Packed sequences are cut into rows of one split beforehand; a table
names the sequence of each row, and the block of `ht` holds the states of all sequences.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.ops.chunk_gates import decayed, exponents
from opmux.core.ops.chunk_states import GATES, ChunkParams, outputs, without_tokens
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.interpret.chunk_fwd_h_blocks import Blocks, token_rows
from opmux.plugins.interpret.chunk_fwd_h_config import ChunkFwdHConfig


def chunk_fwd_h(request: Request, operands: Operands, config: ChunkFwdHConfig) -> Outputs:
    """The states between splits, and after each sequence."""
    trivial = without_tokens(request, operands)
    if trivial is not None:
        return trivial
    params: ChunkParams = request.params
    specs = outputs(request)
    blocks = Blocks.of(request, config)
    inputs, table = token_rows(request, operands)
    if "h0" in operands:
        inputs["h0"] = operands["h0"]

    def kernel(refs: dict[str, Any], h_ref: Any, ht_ref: Any) -> None:
        batch, step = pl.program_id(0), pl.program_id(4)

        @pl.when(step == 0)
        def start() -> None:
            ht_ref[...] = refs["h0"][...] if "h0" in refs else jnp.zeros(ht_ref.shape, ht_ref.dtype)

        lengths = blocks.lengths(refs, batch, step)
        rows = blocks.rows(refs, lengths, ht_ref.dtype)
        gates = {name: rows[name] for name in GATES if name in rows}
        decay = exponents(gates, lengths, params.span, params.chunk, params.raw, blocks.full)
        k, v = decayed(rows["k"], decay.k), decayed(rows["v"], decay.v)
        added = lax.dot_general(k, v, (((2,), (2,)), ((1, 0, 3), (1, 0, 3))), precision=lax.Precision.HIGHEST)
        factors = [jnp.exp(e) for e in (decay.state_k, decay.state_v) if e is not None]

        def advance(s: jax.Array, _: None) -> None:
            at = blocks.state_of(refs, s)
            state = ht_ref[at]
            h_ref[:, pl.ds(s, 1)] = state[:, None].astype(h_ref.dtype)
            for factor in factors:
                state = state * lax.dynamic_index_in_dim(factor, s, 1, keepdims=False)
            ht_ref[at] = state + lax.dynamic_index_in_dim(added, s, 0, keepdims=False)

        lax.fori_loop(0, blocks.bs, advance, None)

    h, ht = pl.pallas_call(
        kernel,
        grid=blocks.grid,
        in_specs=[{name: blocks.spec(name) for name in inputs}],
        out_specs=[blocks.spec("h"), blocks.spec("ht")],
        out_shape=[jax.ShapeDtypeStruct(specs[name].shape, specs[name].dtype) for name in ("h", "ht")],
        interpret=True,
        name="chunk_fwd_h",
    )(inputs)
    if table is not None:
        h = jnp.where((table.length > 0)[:, None, None, None], h, 0)
    return {"h": h, "ht": ht}

"""The backward of `chunk_fwd_h` for packed sequences, a Mosaic TPU kernel that moves everything itself.

One loop runs over the rows of the index table, the last one first, as the forward's does; see `chunk_fwd_h_packed`:

    in      k, v, gk, gv, scalars; states of chunks that have tokens; d_h of those that were stored; d_ht
    out     d_k, d_v, d_gk, d_gv, d_scalars, d_h0

The buffer of a chunk may hold tokens of its neighbours, whose cotangents are other rows' to write. So a short chunk
is written in pieces whose sizes are the powers of two that its length is made of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core.request import Operands, Outputs
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import Sizes
from opmux.plugins.mosaic_tpu.chunk_fwd_h_copies import CHANNELS, Copies, launch, whole_blocks
from opmux.plugins.mosaic_tpu.chunk_fwd_h_gates import Window, pick_scalar_gates, scalar_exponents
from opmux.plugins.mosaic_tpu.chunk_fwd_h_heads import copy_heads, rows_scratch
from opmux.plugins.mosaic_tpu.chunk_fwd_h_step import chunk_of, chunk_scratch
from opmux.plugins.mosaic_tpu.chunk_fwd_h_table import Layout, index_table, layout
from opmux.plugins.mosaic_tpu.chunk_fwd_h_vjp_step import Pullback


def packed_cotangents(operands: Operands, sizes: Sizes, wanted: tuple[str, ...], vmem_limit: int) -> Outputs:
    """Cotangents by name; those of the scalar gates where `scalars` is wanted."""
    H = sizes.H
    scalar_gates, pull_scalars = pick_scalar_gates(operands), None
    fields = layout(sizes)
    index = index_table(operands["cu_seqlens"], sizes, fields)
    operands = dict(operands)
    if scalar_gates:
        scalars, pull_scalars = jax.vjp(lambda gates: scalar_exponents(gates, sizes, index), scalar_gates)
        operands["scalars"] = scalars
    operands, sizes = whole_blocks(operands, sizes)
    inputs = {n: operands[n] for n in (*CHANNELS, "scalars", "states", "d_h", "d_ht") if n in operands}
    like = jax.typeof(inputs["k"]).manual_axis_type
    shapes = {
        f"d_{name}": jax.ShapeDtypeStruct(operands[name].shape, operands[name].dtype, manual_axis_type=like)
        for name in wanted
    }
    scratch = {
        "d_state": pltpu.VMEM((sizes.bh, sizes.K, sizes.V), jnp.float32),
        **chunk_scratch(inputs, sizes),
        **rows_scratch(shapes, sizes, "d_"),
    }
    found = launch(
        lambda *refs: _kernel(*refs, fields=fields, sizes=sizes), index, inputs, shapes, scratch, sizes,
        grid=(sizes.head_blocks,), vmem_limit=vmem_limit, name="chunk_fwd_h_vjp_packed",
    )  # fmt: skip
    cotangents = {name[2:]: _first_heads(name[2:], array, H) for name, array in found.items()}
    if pull_scalars is not None and "scalars" in wanted:
        # Rows without tokens have no cotangent, and those that were not run hold anything.
        used = (index.rows.length > 0)[:, None, None]
        cotangents |= pull_scalars(jnp.where(used, cotangents["scalars"], 0.0))[0]
    return cotangents


def _first_heads(name: str, array: jax.Array, heads: int) -> jax.Array:
    axis = 1 if name == "h0" else 2
    return array if array.shape[axis] == heads else lax.slice_in_dim(array, 0, heads, axis=axis)


class _Rows:
    """Writes the cotangents of the tokens of a chunk, and no others."""

    def __init__(self, copies: Copies, names: tuple[str, ...], bt: int):
        self._copies, self._names, self._bt = copies, names, bt

    def start(self, token: Any, first: Any, length: Any, slot: Any) -> None:
        """Starts to write `length` tokens, from place `first` of the slot's blocks to token `token` on."""
        self._each(lambda copy: copy.start(), token, first, length, slot)

    def wait(self, length: Any, slot: Any) -> None:
        """Waits for as many tokens to be written."""
        self._each(lambda copy: copy.wait(), jnp.int32(0), jnp.int32(0), length, slot)

    def _each(self, act: Callable[[Any], None], token: Any, first: Any, length: Any, slot: Any) -> None:
        @pl.when(length == self._bt)
        def _whole() -> None:
            for name in self._names:
                act(self._copies.tokens(name, token, slot, out=True))

        @pl.when(length < self._bt)
        def _pieces() -> None:
            for bit in reversed(range((self._bt - 1).bit_length())):
                done = (length >> (bit + 1)) << (bit + 1)

                @pl.when(((length >> bit) & 1) == 1)
                def _piece(size: int = 1 << bit, done: Any = done) -> None:
                    for name in self._names:
                        act(self._copies.tokens(name, token + done, slot, first=first + done, size=size, out=True))


def _kernel(
    counts: Any,
    table: Any,
    inputs: Mapping[str, Any],
    out: Mapping[str, Any],
    buffers: Mapping[str, Any],
    semaphores: Any,
    scratch: Mapping[str, Any],
    *,
    fields: Layout,
    sizes: Sizes,
) -> None:
    copies = Copies({**inputs, **out}, buffers, semaphores, sizes)
    tokens_out = tuple(name for name in out if name[2:] in CHANNELS)
    rows_out = _Rows(copies, tokens_out, sizes.bt)
    field, zero = fields.field, jnp.int32(0)
    d_state, count = scratch["d_state"], counts[1]

    def state_loads(words: Any, stored: Any, chunks: Any, slot: Any) -> list[tuple[Any, Any]]:
        """Copies with the conditions under which they are made."""
        wanted = {
            "states": (field("length", words) > 0, (0, jnp.maximum(chunks - 1, 0))),
            "d_h": (field("stores", words) == 1, (0, jnp.maximum(stored - 1, 0))),
            "d_ht": (field("closes", words) == 1, (field("sequence", words),)),
        }
        return [(when, copies.states(n, at, slot)) for n, (when, at) in wanted.items() if n in inputs]

    def load(row: Any, words: Any, stored: Any, chunks: Any, slot: Any) -> None:
        for copy in copies.loads(row, field("start", words), slot):
            copy.start()
        for condition, copy in state_loads(words, stored, chunks, slot):
            pl.when(condition)(copy.start)

    def run_row(turn: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        words, stored, chunks, opened, length_before, length_earlier = carry
        row, slot = count - 1 - turn, turn & 1
        following = fields.row(table, jnp.maximum(row - 1, 0))
        length, stores = field("length", words), field("stores", words)
        stored_next, chunks_next = stored - stores, chunks - (length > 0).astype(jnp.int32)

        @pl.when(row > 0)
        def _prefetch() -> None:
            load(row - 1, following, stored_next, chunks_next, 1 - slot)

        rows_out.wait(length_earlier, slot)
        if "d_scalars" in out:

            @pl.when(turn >= 2)
            def _free_slot() -> None:
                copies.scalars("d_scalars", zero, slot, out=True).wait()

        for copy in copies.loads(zero, zero, slot):
            copy.wait()
        for condition, copy in state_loads(words, stored, chunks, slot):
            pl.when(condition)(copy.wait)

        @pl.when(field("closes", words) == 1)
        def _close() -> None:
            copy_heads(d_state, buffers["d_ht"].at[slot] if "d_ht" in inputs else None)

        first = field("shift", words)
        here = {name: ref.at[slot] for name, ref in buffers.items()}
        tokens = {name: here[name] for name in inputs}
        chunk = chunk_of(tokens, scratch, Window(first, first + length))
        pullback = Pullback(chunk, tokens, here.get("states"), {name[2:]: here[name] for name in out}, scratch)

        def d_stored(*at: Any) -> jax.Array:
            # What the slot holds where nothing was stored is not of this row.
            return jnp.where(stores == 1, here["d_h"][at].astype(jnp.float32), 0.0)

        every = d_stored if "d_h" in inputs else None
        pullback.retreat(sizes.bh, sizes.at_once, d_state, every)
        pullback.finish()

        rows_out.start(field("start", words) + first, first, length, slot)
        if "d_scalars" in out:
            copies.scalars("d_scalars", row, slot, out=True).start()
        opens = open_sequence(words, opened)
        return following, stored_next, chunks_next, opened + opens, length, length_before

    def open_sequence(words: Any, opened: Any) -> Any:
        if "d_h0" not in out:
            return zero
        copies.send_state("d_h0", d_state, field("opens", words), opened, field("sequence", words))
        return field("opens", words)

    last = fields.row(table, count - 1)
    load(count - 1, last, counts[2], counts[3], zero)
    carry = (last, counts[2], counts[3], zero, zero, zero)
    *_, opened, length_last, length_before = lax.fori_loop(zero, count, run_row, carry)

    # What is still on its way out.
    rows_out.wait(length_last, (count - 1) & 1)
    rows_out.wait(length_before, count & 1)
    if "d_scalars" in out:
        for back in (1, 2):

            @pl.when(count >= back)
            def _wait_for_scalars(slot: Any = (count - back) & 1) -> None:
                copies.scalars("d_scalars", zero, slot, out=True).wait()

    if "d_h0" in out:
        copies.wait_for_sent("d_h0", opened)

    # Tokens after the last sequence, which only traced offsets leave, have no part in anything.
    for name in tokens_out:
        buffers[name][0] = jnp.zeros(buffers[name].shape[1:], buffers[name].dtype)

    def clear(turn: Any, _: Any) -> None:
        token = counts[4] + turn * jnp.int32(sizes.bt)
        length = jnp.minimum(sizes.T - token, sizes.bt)
        rows_out.start(token, zero, length, zero)
        rows_out.wait(length, zero)

    lax.fori_loop(zero, lax.div(sizes.T - counts[4] + jnp.int32(sizes.bt - 1), jnp.int32(sizes.bt)), clear, None)

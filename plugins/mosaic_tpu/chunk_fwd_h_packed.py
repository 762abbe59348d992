"""`chunk_fwd_h` for packed sequences as a Mosaic TPU kernel that moves everything itself.

A sequence may begin at any token, so blocks of a grid do not fit. One loop runs over the rows of an index table in
scalar memory, a chunk each; while a row is computed, the next one is copied in and the one before is copied out:

            row i - 1              row i                row i + 1
    in      ...                    wait                 start            k, v, gk, gv, scalars, h0    slot i & 1
    compute state ──► state        state ──► state
    out     start ───────────────► (on its way) ──────► wait             h, ht                        two slots

A chunk is copied as `bt` tokens wherever it lies, so its buffer may begin and end with tokens of its neighbours, which
take no part.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from opmux.plugins.mosaic_tpu.chunk_fwd_h_heads import copy_heads, for_heads
from opmux.plugins.mosaic_tpu.chunk_fwd_h_step import chunk_of, chunk_scratch
from opmux.plugins.mosaic_tpu.chunk_fwd_h_table import Layout, index_table, layout


def packed_states(operands: Operands, sizes: Sizes, stored: Any, final: bool, vmem_limit: int) -> Outputs:
    """The states of packed sequences; see `chunk_fwd_h.states`."""
    H = sizes.H
    operands, sizes = whole_blocks(operands, sizes)
    fields = layout(sizes)
    index = index_table(operands["cu_seqlens"], sizes, fields)
    inputs = {name: operands[name] for name in (*CHANNELS, "h0") if name in operands}
    scalar_gates = pick_scalar_gates(operands)
    if scalar_gates:
        inputs["scalars"] = scalar_exponents(scalar_gates, sizes, index)
    like = jax.typeof(inputs["k"]).manual_axis_type
    state = (sizes.H, sizes.K, sizes.V)
    shapes = {"h": jax.ShapeDtypeStruct((1, sizes.num_splits, *state), stored, manual_axis_type=like)}
    if final:
        shapes["ht"] = jax.ShapeDtypeStruct((sizes.N, *state), jnp.float32, manual_axis_type=like)
    scratch = {"state": pltpu.VMEM((sizes.bh, sizes.K, sizes.bv), jnp.float32), **chunk_scratch(inputs, sizes)}
    found = launch(
        lambda *refs: _kernel(*refs, fields=fields, sizes=sizes), index, inputs, shapes, scratch, sizes,
        grid=(sizes.head_blocks, sizes.value_blocks), vmem_limit=vmem_limit, name="chunk_fwd_h_packed",
    )  # fmt: skip
    return {name: array[..., :H, :, :] if sizes.H != H else array for name, array in found.items()}


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
    field, zero = fields.field, jnp.int32(0)
    state, count = scratch["state"], counts[0]
    tokens_here = {name: buffers[name] for name in inputs if name != "h0"}

    def from_h0(words: Any) -> Any:
        return field("opens", words) & field("real", words) if "h0" in inputs else zero

    def load(row: Any, words: Any, slot: Any) -> None:
        for copy in copies.loads(row, field("start", words), slot):
            copy.start()
        if "h0" in inputs:

            @pl.when(from_h0(words) == 1)
            def _load_initial() -> None:
                copies.states("h0", (field("sequence", words),), slot).start()

    def open_sequence(words: Any, slot: Any) -> None:
        @pl.when((field("opens", words) & (1 - from_h0(words))) == 1)
        def _clear() -> None:
            copy_heads(state, None)

        if "h0" in inputs:

            @pl.when(from_h0(words) == 1)
            def _take_initial() -> None:
                copies.states("h0", (zero,), slot).wait()
                copy_heads(state, buffers["h0"].at[slot])

    def close_sequence(words: Any, closed: Any) -> Any:
        if "ht" not in out:
            return zero
        copies.send_state("ht", state, field("closes", words), closed, field("sequence", words))
        return field("closes", words)

    def run_row(row: Any, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        words, h_row, closed, stored_before, stored_earlier = carry
        slot = row & 1
        following = fields.row(table, jnp.minimum(row + 1, count - 1))

        @pl.when(row + 1 < count)
        def _prefetch() -> None:
            load(row + 1, following, 1 - slot)

        @pl.when(stored_earlier == 1)
        def _free_slot() -> None:
            copies.states("h", (0, zero), slot, out=True).wait()

        for copy in copies.loads(zero, zero, slot):
            copy.wait()
        open_sequence(words, slot)

        begin = field("shift", words)
        window = Window(begin, begin + field("length", words))
        step = chunk_of({name: ref.at[slot] for name, ref in tokens_here.items()}, scratch, window)
        for_heads(sizes.bh, sizes.at_once, lambda head: step.advance(head, state, buffers["h"].at[slot]))

        stores = field("stores", words)

        @pl.when(stores == 1)
        def _store() -> None:
            copies.states("h", (0, h_row), slot, out=True).start()

        closes = close_sequence(words, closed)
        return following, h_row + stores, closed + closes, stores, stored_before

    first = fields.row(table, zero)
    load(zero, first, zero)
    _, _, closed, stored_last, stored_before = lax.fori_loop(zero, count, run_row, (first, zero, zero, zero, zero))

    # What is still on its way out.
    for stored, slot in ((stored_last, (count - 1) & 1), (stored_before, count & 1)):

        @pl.when(stored == 1)
        def _wait_for_states(slot: Any = slot) -> None:
            copies.states("h", (0, zero), slot, out=True).wait()

    if "ht" in out:
        copies.wait_for_sent("ht", closed)

"""Exponents of the decay for the `chunk_fwd_h` kernels: sums of log gates from after a token to the end of its chunk.

    g, g_gamma     one number a token and head: summed by XLA, [B, R, H, bt + 1], the sum over the chunk last
    gk, gv         as wide as keys and values: summed in the kernel, token after token, for all heads at once

Exponents of tokens that take no part are 0, so none of them overflows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.ops.chunk_gates import RESET, exponents
from opmux.core.ops.chunk_index import gather_rows
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import LANES, SUBLANES, Sizes
from opmux.plugins.mosaic_tpu.chunk_fwd_h_table import IndexTable


def pick_scalar_gates(operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """`g` and `g_gamma`, those that are given."""
    return {name: operands[name] for name in ("g", "g_gamma") if name in operands}


def scalar_exponents(gates: Mapping[str, jax.Array], sizes: Sizes, index: IndexTable | None) -> jax.Array:
    """Exponents of the gates of heads, after each token of a chunk and, last, over all of it.

    Args:
      gates: `g` [B, T, H], `g_gamma` [H], or both.
      sizes: sizes of the steps.
      index: the index table of packed sequences.

    Returns:
      float32 [B, R, H, bt + 1], where R is the number of chunks, or of rows of the index table; those of a row of the
      table lie as the kernel finds its tokens.
    """
    B, T, bt = sizes.B, sizes.T, sizes.bt
    rows = dict(gates)
    if index is None:
        R = sizes.chunks
        lengths = jnp.minimum(bt, T - bt * jnp.arange(R, dtype=jnp.int32))
        if "g" in gates:
            rows["g"] = jnp.pad(gates["g"], ((0, 0), (0, R * bt - T), (0, 0))).reshape(B, R, bt, sizes.H)
        return _with_total(rows, jnp.broadcast_to(lengths, (B, R)), sizes, T % bt == 0)

    if "g" in gates:
        rows["g"] = gather_rows(gates["g"], index.rows, bt)
    found = _with_total(rows, index.rows.length[None], sizes, False)
    # The last chunks are copied from some tokens before them, since nothing lies past the end. The exponent after
    # the last place is 0, which does for all tokens of others.
    place = jnp.arange(bt, dtype=jnp.int32) - index.shift[:, None]
    place = jnp.concatenate([jnp.where(place < 0, bt - 1, place), jnp.full_like(place[:, :1], bt)], 1)
    return jnp.take_along_axis(found, place[None, :, None, :], axis=3)


def _with_total(gates: Mapping[str, jax.Array], lengths: jax.Array, sizes: Sizes, full: bool) -> jax.Array:
    decay = exponents(gates, lengths, sizes.bt, sizes.bt, sizes.raw, full)
    assert decay.v is not None
    assert decay.state_v is not None
    return jnp.concatenate([jnp.swapaxes(decay.v[..., 0], 2, 3), decay.state_v[..., 0]], axis=3)


@dataclass(frozen=True)
class Window:
    """Tokens of a step that take part: those from `begin` to before `end`; None for all of them.

    Whatever the others hold, NaN included, must not reach a sum.
    """

    begin: Any = None
    end: Any = None

    @property
    def full(self) -> bool:
        """All tokens are known to take part."""
        return self.end is None

    def keep(self, rows: jax.Array) -> jax.Array:
        """Rows `[bt, D]` in float32, with 0 in place of those that take no part."""
        rows = rows.astype(jnp.float32)
        if self.full:
            return rows
        place = lax.broadcasted_iota(jnp.int32, rows.shape, 0)
        return jnp.where((place >= self.begin) & (place < self.end), rows, 0.0)

    def has(self, token: Any) -> Any:
        """Whether a token takes part."""
        return (token >= self.begin) & (token < self.end)

    def last(self, tokens: int) -> Any:
        """The last token that takes part, or any if none does."""
        return tokens - 1 if self.full else jnp.maximum(self.end - 1, 0)


def read_row(rows: Any, row: Any, channels: Any) -> jax.Array:
    """Some channels of a row of `[M, D]` in memory, `[1, D]`, where the row is known to the kernel only."""
    if rows.shape[-1] <= LANES:
        return rows[pl.ds(row, 1), channels]
    # Mosaic loads from any row only where rows are one tile wide.
    found = rows[:, channels]
    return jnp.sum(jnp.where(_is_row(found, row), found, 0.0), axis=0, keepdims=True)


def write_row(rows: Any, row: Any, channels: Any, found: jax.Array) -> None:
    """Stores what `read_row` would load."""
    if rows.shape[-1] <= LANES:
        rows[pl.ds(row, 1), channels] = found
    else:
        before = rows[:, channels]
        rows[:, channels] = jnp.where(_is_row(before, row), found, before)


def _is_row(rows: jax.Array, row: Any) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, rows.shape, 0) == row


def sum_after(gate: Any, window: Window, after: Any, totals: Any) -> None:
    """Sums gates per token `[bt, bh, D]`, from the last token to the first: into `after` those after each token, and
    into `totals` `[bh, D]` all of them. Plain additions for all heads at once, since tokens are no tiled axis.
    """
    bt = gate.shape[0]

    def add(token: Any, so_far: jax.Array) -> jax.Array:
        after[token] = so_far
        found = jnp.maximum(gate[token], RESET)
        return so_far + (found if window.full else jnp.where(window.has(token), found, 0.0))

    def add_some(turn: Any, so_far: jax.Array) -> jax.Array:
        last = jnp.int32(bt - 1) - turn * jnp.int32(SUBLANES)
        for token in range(SUBLANES):
            so_far = add(last - jnp.int32(token), so_far)
        return so_far

    so_far = lax.fori_loop(0, bt // SUBLANES, add_some, jnp.zeros(totals.shape, jnp.float32))
    for token in reversed(range(bt % SUBLANES)):
        so_far = add(token, so_far)
    totals[...] = so_far


def sum_before(gate: Any, window: Window, rows: Any, totals: Any) -> None:
    """The transpose of `sum_after`, in place: cotangents of gates `[bt, bh, D]` from those of their sums."""
    bt = rows.shape[0]

    def add(token: Any, so_far: jax.Array) -> jax.Array:
        d_after = rows[token]
        # A gate below that is taken for a reset, whatever it is.
        takes_part = gate[token] > RESET
        if not window.full:
            takes_part &= window.has(token)
        rows[token] = jnp.where(takes_part, so_far, 0.0)
        return so_far + d_after

    def add_some(turn: Any, so_far: jax.Array) -> jax.Array:
        for token in range(SUBLANES):
            so_far = add(turn * jnp.int32(SUBLANES) + jnp.int32(token), so_far)
        return so_far

    so_far = lax.fori_loop(0, bt // SUBLANES, add_some, totals[...])
    for token in range(bt - bt % SUBLANES, bt):
        so_far = add(token, so_far)


@dataclass(frozen=True)
class ChannelGate:
    """The log gates of channels of a chunk in memory.

    Attributes:
      rows: running sums by head, or where gates are per token the sums after each token, `[bh, bt, D]`.
      window: tokens that take part.
      totals: sums over the chunk `[bh, D]` where gates are per token, else None.
    """

    rows: Any
    window: Window
    totals: Any

    def total(self, head: Any, channels: Any) -> jax.Array:
        """Exponents of the state of a head `[1, D]`, for some of its channels."""
        if self.totals is not None:
            return read_row(self.totals, head, channels)
        total = read_row(self.rows.at[head], self.window.last(self.rows.shape[1]), channels)
        return total if self.window.full else jnp.where(self.window.end > self.window.begin, total, 0.0)

    def after(self, head: Any, channels: Any) -> jax.Array:
        """Exponents of the tokens of a head `[bt, D]`, for some of its channels."""
        rows = self.rows[head, :, channels]
        return self.window.keep(rows if self.totals is not None else self.total(head, channels) - rows)

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
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import SUBLANES, Sizes
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


@dataclass(frozen=True)
class ChannelGate:
    """The log gates of channels of a chunk, `[bt, bh, D]` in memory.

    Attributes:
      gate: the gates as they are given.
      window: tokens that take part.
      after: sums after each token, where gates are per token; else None.
      total: sums over the chunk `[bh, D]` likewise.
    """

    gate: Any
    window: Window
    after: Any = None
    total: Any = None

    def sum_up(self) -> None:
        """Sums gates per token, from the last token to the first: plain additions, since tokens are no tiled axis."""
        bt = self.gate.shape[0]

        def add(token: Any, total: jax.Array) -> jax.Array:
            self.after[token] = total
            gate = jnp.maximum(self.gate[token], RESET)
            return total + (gate if self.window.full else jnp.where(self.window.has(token), gate, 0.0))

        def add_some(turn: Any, total: jax.Array) -> jax.Array:
            last = jnp.int32(bt - 1) - turn * jnp.int32(SUBLANES)
            for token in range(SUBLANES):
                total = add(last - jnp.int32(token), total)
            return total

        total = jnp.zeros(self.total.shape, jnp.float32)
        total = lax.fori_loop(0, bt // SUBLANES, add_some, total)
        for token in reversed(range(bt % SUBLANES)):
            total = add(token, total)
        self.total[...] = total

    def exponents(self, head: int) -> tuple[jax.Array, jax.Array]:
        """Of the tokens of a head `[bt, D]`, and of its state `[1, D]`."""
        if self.after is not None:
            return self.window.keep(self.after[:, head, :]), self.total[head : head + 1, :]
        total = self.gate[self.last(), head, :]
        if not self.window.full:
            total = jnp.where(self.window.end > self.window.begin, total, 0.0)
        return self.window.keep(total - self.gate[:, head, :]), total

    def last(self) -> Any:
        """Index of the last token that takes part, or of any, as a slice."""
        if self.window.full:
            return slice(self.gate.shape[0] - 1, self.gate.shape[0])
        return pl.ds(jnp.maximum(self.window.end - 1, 0), 1)

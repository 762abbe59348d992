"""What one chunk does to the states of its heads, for both forward kernels of `chunk_fwd_h`.

    k [bt, K] ──► * exp(after gk) ──► transpose ──► * exp(after g) ─┐
                                                                    ├─► product [K, V] ──► + ──► state
    v [bt, V] ──► * exp(after gv) ──────────────────────────────────┘                      ▲
                                                                     exp(total) * state ───┘

The constant and scalar gates of tokens lie along lanes, as the transposed keys do. States of more than 128 key or
value channels are computed in tiles of 128 x 128, which depend on nothing in each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import LANES, Sizes
from opmux.plugins.mosaic_tpu.chunk_fwd_h_gates import ChannelGate, Window, read_row, sum_after
from opmux.plugins.mosaic_tpu.chunk_fwd_h_heads import rows_scratch, to_heads


@dataclass(frozen=True)
class Chunk:
    """A chunk in vector memory, for all heads of a step.

    Attributes:
      k: keys by head `[bh, bt, K]`.
      v: values by head `[bh, bt, V]`.
      window: tokens that take part.
      gk, gv: gates of the channels, or None.
      scalars: exponents of `scalar_exponents`, `[bh, bt + 1]`, or None.
    """

    k: Any
    v: Any
    window: Window
    gk: ChannelGate | None
    gv: ChannelGate | None
    scalars: Any

    def advance(self, head: Any, state: Any, stored: Any | None) -> None:
        """Makes the state of a head the one after the chunk.

        Args:
          head: the head.
          state: states of all heads, float32 `[bh, K, V]` in memory.
          stored: where to put the state before the chunk, `[bh, K, V]` in memory.
        """

        def tile(i: Any, j: Any) -> None:
            rows, of_rows = self._keys(head, i)
            values, of_columns = self._values(head, j)
            before = state[head, i, j]
            if stored is not None:
                stored[head, i, j] = before.astype(stored.dtype)
            state[head, i, j] = decay(before, of_rows, of_columns) + product(rows, values, self.k.dtype)

        for_tiles(state.shape[1], lambda i: for_tiles(state.shape[2], lambda j: tile(i, j)))

    def _keys(self, head: Any, channels: Any) -> tuple[jax.Array, jax.Array | None]:
        """Decayed keys, transposed `[K, bt]`, and exponents of the rows of the state `[1, K]`."""
        keys, total = self.window.keep(self.k[head, :, channels]), None
        if self.gk is not None:
            total = self.gk.total(head, channels)
            keys = keys * jnp.exp(self.gk.after(head, channels))
        keys = keys.T
        if self.scalars is not None:
            keys = keys * jnp.exp(read_row(self.scalars, head, slice(0, self.k.shape[1])))
        return keys, total

    def _values(self, head: Any, channels: Any) -> tuple[jax.Array, jax.Array | None]:
        """Decayed values `[bt, V]`, and exponents of the columns of the state `[1, V]` or `[1, 1]`."""
        values, total = self.window.keep(self.v[head, :, channels]), None
        if self.gv is not None:
            total = self.gv.total(head, channels)
            values = values * jnp.exp(self.gv.after(head, channels))
        if self.scalars is not None:
            scalar = read_row(self.scalars, head, slice(self.k.shape[1], None))
            total = scalar if total is None else total + scalar
        return values, total


def tiles(channels: int) -> list[slice]:
    """Channels in groups of 128."""
    return [slice(first, min(first + LANES, channels)) for first in range(0, channels, LANES)]


def for_tiles(channels: int, run: Callable[[Any], None]) -> None:
    """Runs groups of 128 channels one after another, apart for the compiler, which would run out of registers."""
    whole = channels // LANES if channels > LANES else 0
    if whole > 1:
        lax.fori_loop(0, whole, lambda tile, _: run(pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)), None)
    for some in tiles(channels)[0 if whole == 1 else whole :]:
        run(some)


def decay(state: jax.Array, of_rows: jax.Array | None, of_columns: jax.Array | None) -> jax.Array:
    """The state `[K, V]` times exponentials of its rows `[1, K]` and its columns `[1, V]` or `[1, 1]`."""
    if of_rows is not None:
        # A row becomes a column as the transpose of equal rows.
        state = state * jnp.broadcast_to(jnp.exp(of_rows), state.shape[::-1]).T
    return state if of_columns is None else state * jnp.exp(of_columns)


def product(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """`a @ b` in float32, of operands in `dtype`; by default a product of float32 is one pass of bfloat16."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.dot(a.astype(dtype), b.astype(dtype), precision=precision, preferred_element_type=jnp.float32)


def chunk_scratch(arrays: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Scratch of a chunk: rows by head, and sums of gates per token."""
    shapes = rows_scratch(arrays, sizes)
    for name, channels in (("gk", sizes.K), ("gv", sizes.bv)):
        if sizes.raw and name in arrays:
            shapes[f"{name}_after"] = pltpu.VMEM((1, sizes.bt, sizes.bh, channels), jnp.float32)
            shapes[f"{name}_total"] = pltpu.VMEM((sizes.bh, channels), jnp.float32)
    return shapes


def chunk_of(refs: Mapping[str, Any], scratch: Mapping[str, Any], window: Window) -> Chunk:
    """The chunk whose tokens lie in refs by name, turned and its gates summed up in scratch.

    Args:
      refs: tokens `[bt, bh, D]` or `[1, bt, bh, D]`, and `scalars` `[bh, bt + 1]`.
      scratch: of `chunk_scratch`.
      window: tokens that take part.
    """
    gates: dict[str, ChannelGate] = {}
    for name in ("k", "v", "gk", "gv"):
        if name not in refs:
            continue
        tokens, totals = refs[name], scratch.get(f"{name}_total")
        if totals is not None:
            sums = scratch[f"{name}_after"]
            sum_after(tokens.at[0] if len(tokens.shape) == 4 else tokens, window, sums.at[0], totals)
            tokens = sums
        to_heads(tokens, scratch[f"{name}_rows"])
        gates[name] = ChannelGate(scratch[f"{name}_rows"], window, totals)
    k, v = scratch["k_rows"], scratch["v_rows"]
    return Chunk(k, v, window, gates.get("gk"), gates.get("gv"), refs.get("scalars"))

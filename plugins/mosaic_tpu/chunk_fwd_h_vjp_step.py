"""What one chunk does to the cotangents of its heads, for both backward kernels of `chunk_fwd_h`.

    d_after [K, V] ──► times the values, transposed ──► d_k [bt, K] ──► times k ──► of the exponents of gk
         │       └───► times the keys ────────────────► d_v [bt, V] ──► times v ──► of the exponents of gv
         ▼
    decayed ──► d_before [K, V]
         └────► times the state before the chunk ──► of the sums of gates over the chunk

The constant and scalar gates act on the keys here. Their cotangents are sums over channels, which lie along lanes;
those come out of the matrix unit, as products with ones, along lanes again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import SUBLANES
from opmux.plugins.mosaic_tpu.chunk_fwd_h_gates import ChannelGate, read_row, sum_before, write_row
from opmux.plugins.mosaic_tpu.chunk_fwd_h_heads import for_heads, to_tokens
from opmux.plugins.mosaic_tpu.chunk_fwd_h_step import Chunk, decay, tiles


class _Side(NamedTuple):
    """Keys or values of a head, some of their channels, and their decay."""

    rows: jax.Array
    scale: jax.Array | None

    def scaled(self, rows: jax.Array) -> jax.Array:
        return rows if self.scale is None else rows * self.scale


@dataclass(frozen=True)
class Pullback:
    """The backward of a chunk in vector memory, for all heads of a step.

    Attributes:
      chunk: the chunk.
      gates: gates of channels as they were given, by name, `[bt, bh, D]`.
      states: states before it, float32 `[bh, K, V]`; None where no gate has a cotangent.
      out: cotangents by name: `k`, `v`, `gk`, `gv`, each `[bt, bh, D]`, and `scalars` `[bh, bt + 1]`.
      scratch: of the chunk, and `d_<name>_rows` for those of channels.
    """

    chunk: Chunk
    gates: Mapping[str, Any]
    states: Any
    out: Mapping[str, Any]
    scratch: Mapping[str, Any]

    def retreat(self, heads: int, at_once: int, d_state: Any, d_stored: Any | None) -> None:
        """Makes the cotangents of states those before the chunk, and notes those of tokens on the way.

        Args:
          heads: number of heads.
          at_once: heads whose work the compiler may interleave.
          d_state: cotangents of the states of all heads, float32 `[bh, K, V]` in memory.
          d_stored: a function from a head and two slices of channels to the cotangent of the state as it was stored.
        """
        # One loop after another, since all of it at once takes more registers than there are.
        for_heads(heads, at_once, lambda head: self._of_keys(head, d_state))
        for_heads(heads, at_once, lambda head: self._of_values(head, d_state))
        for_heads(heads, at_once, lambda head: self._of_state(head, d_state, d_stored))

    def _of_keys(self, head: Any, d_state: Any) -> None:
        """Cotangents of the keys, and of the sums of gates after each token that act on them."""
        K, V = d_state.shape[1:]
        d_scalars: Any = 0.0
        for i in tiles(K):
            found: Any = 0.0
            for j in tiles(V):
                value = self._values(head, j)
                found += self._times(value.scaled(value.rows), d_state[head, i, j], 1)
            key = self._keys(head, i)
            d_keys = key.scaled(found)
            self._write("k", head, i, d_keys)
            d_after = key.rows * d_keys
            if "gk" in self.out:
                self._write_sums("gk", self.chunk.gk, head, i, d_after)
            if "scalars" in self.out:
                d_scalars += _sum_of_lanes(d_after)
        if "scalars" in self.out:
            write_row(self.out["scalars"], head, slice(0, self.chunk.k.shape[1]), d_scalars)

    def _of_values(self, head: Any, d_state: Any) -> None:
        """Cotangents of the values, and of the sums of `gv` after each token."""
        if "v" not in self.out and "gv" not in self.out:
            return
        K, V = d_state.shape[1:]
        for j in tiles(V):
            found: Any = 0.0
            for i in tiles(K):
                key = self._keys(head, i)
                found += self._times(key.scaled(key.rows), d_state[head, i, j], 0)
            value = self._values(head, j)
            d_values = value.scaled(found)
            self._write("v", head, j, d_values)
            if "gv" in self.out:
                self._write_sums("gv", self.chunk.gv, head, j, value.rows * d_values)

    def _of_state(self, head: Any, d_state: Any, d_stored: Any | None) -> None:
        """Cotangents of the state before the chunk, and of the sums of gates over it."""
        K, V = d_state.shape[1:]
        rows: list[Any] = [0.0] * len(tiles(K))
        d_scalar: Any = 0.0
        for j in tiles(V):
            of_columns, columns = self._total_of_values(head, j), jnp.zeros((1, j.stop - j.start), jnp.float32)
            for number, i in enumerate(tiles(K)):
                of_rows = None if self.chunk.gk is None else self.chunk.gk.total(head, i)
                d_before = decay(d_state[head, i, j], of_rows, of_columns)
                if self.states is not None:
                    d_total = d_before * self.states[head, i, j]
                    columns += jnp.sum(d_total, axis=0, keepdims=True)
                    if "gk" in self.out:
                        rows[number] += _sum_of_lanes(d_total)
                d_state[head, i, j] = d_before if d_stored is None else d_before + d_stored(head, i, j)
            if "gv" in self.out:
                self._write_total("gv", self.chunk.gv, head, j, columns)
            if "scalars" in self.out:
                d_scalar += jnp.sum(columns, axis=1, keepdims=True)
        if "gk" in self.out:
            for i, row in zip(tiles(K), rows, strict=True):
                self._write_total("gk", self.chunk.gk, head, i, row)
        if "scalars" in self.out:
            write_row(self.out["scalars"], head, slice(self.chunk.k.shape[1], None), d_scalar)

    def finish(self) -> None:
        """Turns what all heads have noted into cotangents of tokens."""
        for name in ("k", "v", "gk", "gv"):
            if name in self.out:
                to_tokens(self.scratch[f"d_{name}_rows"], self.out[name])
        for name in ("gk", "gv"):
            if name in self.out and f"{name}_total" in self.scratch:
                totals = self.scratch[f"{name}_total"]
                sum_before(self.gates[name], self.chunk.window, self.out[name], totals)

    def _keys(self, head: Any, channels: slice) -> _Side:
        chunk, after = self.chunk, None if self.chunk.gk is None else self.chunk.gk.after(head, channels)
        rows = chunk.window.keep(chunk.k[head, :, channels])
        if chunk.scalars is not None:
            # Along lanes in memory, and wanted along sublanes.
            row = read_row(chunk.scalars, head, slice(0, chunk.k.shape[1]))
            column = jnp.broadcast_to(row, rows.shape[::-1]).T
            after = column if after is None else after + column
        return _Side(rows, None if after is None else jnp.exp(after))

    def _values(self, head: Any, channels: slice) -> _Side:
        chunk, after = self.chunk, None if self.chunk.gv is None else self.chunk.gv.after(head, channels)
        return _Side(chunk.window.keep(chunk.v[head, :, channels]), None if after is None else jnp.exp(after))

    def _total_of_values(self, head: Any, channels: slice) -> jax.Array | None:
        chunk, total = self.chunk, None if self.chunk.gv is None else self.chunk.gv.total(head, channels)
        if chunk.scalars is None:
            return total
        scalar = read_row(chunk.scalars, head, slice(chunk.k.shape[1], None))
        return scalar if total is None else total + scalar

    def _times(self, rows: jax.Array, d_state: jax.Array, axis: int) -> jax.Array:
        """Rows `[bt, D]` times a state's cotangent `[K, V]` along one of its axes, in float32."""
        dtype = self.chunk.k.dtype
        return _product(rows.astype(dtype), d_state.astype(dtype), axis, dtype == jnp.float32)

    def _write(self, name: str, head: Any, channels: slice, found: jax.Array) -> None:
        if name in self.out:
            rows = self.scratch[f"d_{name}_rows"]
            rows[head, :, channels] = found.astype(rows.dtype)

    def _write_sums(self, name: str, gate: ChannelGate | None, head: Any, channels: slice, d_after: jax.Array) -> None:
        """Notes the cotangents `[bt, D]` of the sums of a gate after each token."""
        assert gate is not None
        rows = self.scratch[f"d_{name}_rows"]
        if gate.totals is not None:
            rows[head, :, channels] = d_after
            return
        # The exponent after a token is the running sum at the last one less that at the token.
        rows[head, :, channels] = -d_after
        self._add_to_last(gate, rows.at[head], channels, jnp.sum(d_after, axis=0, keepdims=True))

    def _write_total(self, name: str, gate: ChannelGate | None, head: Any, channels: slice, d_total: jax.Array) -> None:
        """Notes the cotangents `[1, D]` of the sum of a gate over the chunk."""
        assert gate is not None
        if gate.totals is not None:
            write_row(gate.totals, head, channels, d_total)
        else:
            self._add_to_last(gate, self.scratch[f"d_{name}_rows"].at[head], channels, d_total)

    def _add_to_last(self, gate: ChannelGate, rows: Any, channels: slice, d_last: jax.Array) -> None:
        last = gate.window.last(rows.shape[0])
        write_row(rows, last, channels, read_row(rows, last, channels) + d_last)


def _product(a: jax.Array, b: jax.Array, axis: int, exact: bool) -> jax.Array:
    """`a [M, N]` times `b` along its axis of N, in float32."""
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    contract = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _sum_of_lanes(array: jax.Array) -> jax.Array:
    """Sums over the last axis of `[M, N]`, along lanes: `[1, M]`."""
    column = jnp.sum(array, axis=1, keepdims=True)
    return jnp.broadcast_to(column, (array.shape[0], SUBLANES)).T[:1]

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
from jax.experimental import pallas as pl

from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import SUBLANES
from opmux.plugins.mosaic_tpu.chunk_fwd_h_gates import ChannelGate, sum_before
from opmux.plugins.mosaic_tpu.chunk_fwd_h_heads import to_tokens
from opmux.plugins.mosaic_tpu.chunk_fwd_h_step import Chunk, decay, tiles


class _Side(NamedTuple):
    """Keys or values of a head, some of their channels: as they are, their decay, and that of the state's."""

    rows: jax.Array
    scale: jax.Array | None
    total: jax.Array | None

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

    def retreat(self, head: Any, d_state: Any, d_stored: Any | None) -> None:
        """Makes the cotangent of the state of a head the one before the chunk.

        Args:
          head: the head.
          d_state: cotangents of the states of all heads, float32 `[bh, K, V]` in memory.
          d_stored: a function from two slices of channels to the cotangent `[K, V]` of the state as it was stored.
        """
        _, K, V = d_state.shape
        keys, values = [self._keys(head, i) for i in tiles(K)], [self._values(head, j) for j in tiles(V)]
        d_keys: list[Any] = [0.0] * len(keys)
        d_values: list[Any] = [0.0] * len(values)
        d_rows: list[Any] = [0.0] * len(keys)
        d_columns: list[Any] = [0.0] * len(values)
        for j, value in enumerate(values):
            for i, key in enumerate(keys):
                at = (head, tiles(K)[i], tiles(V)[j])
                d_after = d_state[at]
                d_keys[i] += self._times(value.scaled(value.rows), d_after, 1)
                d_values[j] += self._times(key.scaled(key.rows), d_after, 0)
                d_before = decay(d_after, key.total, value.total)
                if self.states is not None:
                    d_total = d_before * self.states[at]
                    d_columns[j] += jnp.sum(d_total, axis=0, keepdims=True)
                    if "gk" in self.out:
                        d_rows[i] += _sum_of_lanes(d_total)
                d_state[at] = d_before if d_stored is None else d_before + d_stored(*at)

        d_scalars: Any = 0.0
        for i, key in enumerate(keys):
            d_key = key.scaled(d_keys[i])
            self._write("k", head, tiles(K)[i], d_key)
            if "gk" in self.out:
                self._pull("gk", self.chunk.gk, head, tiles(K)[i], key.rows * d_key, d_rows[i])
            if "scalars" in self.out:
                d_scalars += _sum_of_lanes(key.rows * d_key)
        for j, value in enumerate(values):
            d_value = value.scaled(d_values[j])
            self._write("v", head, tiles(V)[j], d_value)
            if "gv" in self.out:
                self._pull("gv", self.chunk.gv, head, tiles(V)[j], value.rows * d_value, d_columns[j])
        if "scalars" in self.out:
            bt = self.chunk.k.shape[1]
            self.out["scalars"][pl.ds(head, 1), :bt] = d_scalars
            self.out["scalars"][pl.ds(head, 1), bt:] = sum(jnp.sum(d, axis=1, keepdims=True) for d in d_columns)

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
        chunk, after, total = self.chunk, None, None
        if chunk.gk is not None:
            after, total = chunk.gk.exponents(head, channels)
        rows = chunk.window.keep(chunk.k[head, :, channels])
        if chunk.scalars is not None:
            # Along lanes in memory, and wanted along sublanes.
            row = chunk.scalars[pl.ds(head, 1), : chunk.k.shape[1]]
            column = jnp.broadcast_to(row, rows.shape[::-1]).T
            after = column if after is None else after + column
        return _Side(rows, None if after is None else jnp.exp(after), total)

    def _values(self, head: Any, channels: slice) -> _Side:
        chunk, after, total = self.chunk, None, None
        if chunk.gv is not None:
            after, total = chunk.gv.exponents(head, channels)
        if chunk.scalars is not None:
            scalar = chunk.scalars[pl.ds(head, 1), chunk.k.shape[1] :]
            total = scalar if total is None else total + scalar
        rows = chunk.window.keep(chunk.v[head, :, channels])
        return _Side(rows, None if after is None else jnp.exp(after), total)

    def _times(self, rows: jax.Array, d_state: jax.Array, axis: int) -> jax.Array:
        """Rows `[bt, D]` times a state's cotangent `[K, V]` along one of its axes, in float32."""
        dtype = self.chunk.k.dtype
        return _product(rows.astype(dtype), d_state.astype(dtype), axis, dtype == jnp.float32)

    def _write(self, name: str, head: Any, channels: slice, found: jax.Array) -> None:
        if name in self.out:
            rows = self.scratch[f"d_{name}_rows"]
            rows[head, :, channels] = found.astype(rows.dtype)

    def _pull(
        self, name: str, gate: ChannelGate | None, head: Any, channels: slice, d_after: jax.Array, d_total: jax.Array
    ) -> None:
        """Notes the cotangents of the exponents of a head: of its tokens `[bt, D]`, and of its state `[1, D]`."""
        assert gate is not None
        rows = self.scratch[f"d_{name}_rows"]
        if gate.totals is not None:
            rows[head, :, channels] = d_after
            gate.totals[pl.ds(head, 1), channels] = d_total
            return
        # The exponent after a token is the running sum at the last one less that at the token.
        rows[head, :, channels] = -d_after
        last = gate.window.last(rows.shape[1])
        d_last = jnp.sum(d_after, axis=0, keepdims=True) + d_total
        rows[head, last, channels] = rows[head, last, channels] + d_last


def _product(a: jax.Array, b: jax.Array, axis: int, exact: bool) -> jax.Array:
    """`a [M, N]` times `b` along its axis of N, in float32."""
    precision = lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT
    contract = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def _sum_of_lanes(array: jax.Array) -> jax.Array:
    """Sums over the last axis of `[M, N]`, along lanes: `[1, M]`."""
    return _product(jnp.ones((SUBLANES, array.shape[1]), jnp.float32), array, 1, True)[:1]

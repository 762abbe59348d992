"""What one chunk does to the cotangents of one head, for both backward kernels of `chunk_fwd_h`.

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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from opmux.core.ops.chunk_gates import RESET
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import SUBLANES
from opmux.plugins.mosaic_tpu.chunk_fwd_h_gates import ChannelGate
from opmux.plugins.mosaic_tpu.chunk_fwd_h_step import Chunk, decay


@dataclass(frozen=True)
class Pullback:
    """The backward of a chunk in vector memory, for all heads of a step.

    Attributes:
      chunk: the chunk.
      states: states before it, float32 `[bh, K, V]`; None where no gate has a cotangent.
      out: cotangents by name: `k`, `v`, `gk`, `gv`, each `[bt, bh, D]`, and `scalars` `[bh, bt + 1]`.
      totals: scratch for cotangents of sums over the chunk, `<gate>_total` `[bh, D]`.
    """

    chunk: Chunk
    states: Any
    out: Mapping[str, Any]
    totals: Mapping[str, Any]

    def retreat(self, head: int, d_after: jax.Array, scalars: jax.Array | None) -> jax.Array:
        """The cotangent of the state of a head before the chunk, from the one after it, float32 `[K, V]`.

        Args:
          head: the head.
          d_after: cotangent of the state after the chunk.
          scalars: `scalar_columns` of the step.
        """
        chunk, out = self.chunk, self.out
        keys, values = chunk.window.keep(chunk.k[:, head, :]), chunk.window.keep(chunk.v[:, head, :])
        of_keys = of_values = of_rows = of_columns = None
        if chunk.gk is not None:
            of_keys, of_rows = chunk.gk.exponents(head)
        if chunk.gv is not None:
            of_values, of_columns = chunk.gv.exponents(head)
        if scalars is not None:
            bt = scalars.shape[0]
            column, total = scalars[:, head : head + 1], chunk.scalars[head : head + 1, bt:]
            of_keys = column if of_keys is None else of_keys + column
            of_columns = total if of_columns is None else of_columns + total
        scale_k = None if of_keys is None else jnp.exp(of_keys)
        scale_v = None if of_values is None else jnp.exp(of_values)

        d_keys = scaled(_times(scaled(values, scale_v), d_after, 1, chunk.k.dtype), scale_k)
        d_values = scaled(_times(scaled(keys, scale_k), d_after, 0, chunk.k.dtype), scale_v)
        for name, found in (("k", d_keys), ("v", d_values)):
            if name in out:
                out[name][:, head, :] = found.astype(out[name].dtype)

        d_before = decay(d_after, of_rows, of_columns)
        if self.states is not None:
            d_totals = d_before * self.states[head]
            of_state = jnp.sum(d_totals, axis=0, keepdims=True)
            if "gk" in out:
                self._pull("gk", chunk.gk, head, keys * d_keys, _sum_of_lanes(d_totals))
            if "gv" in out:
                self._pull("gv", chunk.gv, head, values * d_values, of_state)
            if "scalars" in out:
                bt = out["scalars"].shape[1] - 1
                out["scalars"][head : head + 1, :bt] = _sum_of_lanes(keys * d_keys)
                out["scalars"][head : head + 1, bt:] = jnp.sum(of_state, axis=1, keepdims=True)
        return d_before

    def _pull(self, name: str, gate: ChannelGate | None, head: int, d_after: jax.Array, d_total: jax.Array) -> None:
        """Notes the cotangents of the exponents of a head: of its tokens `[bt, D]`, and of its state `[1, D]`."""
        assert gate is not None
        out = self.out[name]
        if gate.after is not None:
            out[:, head, :] = d_after
            self.totals[f"{name}_total"][head : head + 1, :] = d_total
            return
        # The exponent after a token is the running sum at the last one less that at the token.
        out[:, head, :] = -d_after
        last = gate.last()
        out[last, head, :] = out[last, head, :] + (jnp.sum(d_after, axis=0, keepdims=True) + d_total)

    def finish(self) -> None:
        """Cotangents of gates per token, from those of their sums, for all heads at once."""
        for name, gate in (("gk", self.chunk.gk), ("gv", self.chunk.gv)):
            if gate is not None and gate.after is not None and name in self.out:
                _running_sum(gate, self.out[name], self.totals[f"{name}_total"])


def _running_sum(gate: ChannelGate, out: Any, totals: Any) -> None:
    """Replaces cotangents of sums after each token by those of gates: a token is in all sums of those before it."""
    bt, window = out.shape[0], gate.window

    def add(token: Any, total: jax.Array) -> jax.Array:
        d_after = out[token]
        # A gate below that is taken for a reset, whatever it is.
        takes_part = gate.gate[token] > RESET
        if not window.full:
            takes_part &= window.has(token)
        out[token] = jnp.where(takes_part, total, 0.0)
        return total + d_after

    def add_some(turn: Any, total: jax.Array) -> jax.Array:
        for token in range(SUBLANES):
            total = add(turn * jnp.int32(SUBLANES) + jnp.int32(token), total)
        return total

    total = lax.fori_loop(0, bt // SUBLANES, add_some, totals[...])
    for token in range(bt - bt % SUBLANES, bt):
        total = add(token, total)


def scalar_columns(scalars: Any) -> jax.Array:
    """Exponents of the tokens `[bt, bh]`, from `[bh, bt + 1]` in memory."""
    bt = scalars.shape[1] - 1
    return scalars[:, :bt].T


def scaled(array: jax.Array, scale: jax.Array | None) -> jax.Array:
    """The array times a factor, if there is one."""
    return array if scale is None else array * scale


def _times(rows: jax.Array, d_state: jax.Array, axis: int, dtype: Any) -> jax.Array:
    """Rows `[bt, D]` times a state's cotangent `[K, V]` along one of its axes, in float32."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = (((1,), (axis,)), ((), ()))
    return lax.dot_general(
        rows.astype(dtype), d_state.astype(dtype), contract, precision=precision, preferred_element_type=jnp.float32
    )


def _sum_of_lanes(array: jax.Array) -> jax.Array:
    """Sums over the last axis of `[M, N]`, along lanes: `[1, M]`."""
    ones = jnp.ones((SUBLANES, array.shape[1]), jnp.float32)
    contract = (((1,), (1,)), ((), ()))
    return lax.dot_general(ones, array, contract, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)[
        :1
    ]

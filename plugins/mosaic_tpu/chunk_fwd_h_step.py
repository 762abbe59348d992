"""What one chunk does to the state of one head, for both forward kernels of `chunk_fwd_h`.

    k [bt, K] ──► * exp(after gk) ──► transpose ──► * exp(after g) ─┐
                                                                    ├─► product [K, V] ──► + ──► state
    v [bt, V] ──► * exp(after gv) ──────────────────────────────────┘                      ▲
                                                                     exp(total) * state ───┘

The constant and scalar gates of tokens lie along lanes, as the transposed keys do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import Sizes
from opmux.plugins.mosaic_tpu.chunk_fwd_h_gates import ChannelGate, Window


@dataclass(frozen=True)
class Chunk:
    """A chunk in vector memory, for all heads of a step.

    Attributes:
      k: keys `[bt, bh, K]`.
      v: values `[bt, bh, V]`.
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

    def advance(self, head: int, state: jax.Array) -> jax.Array:
        """The state of a head after the chunk, from the one before it, float32 `[K, V]`."""
        keys, values = self.window.keep(self.k[:, head, :]), self.window.keep(self.v[:, head, :])
        of_rows = of_columns = None
        if self.gk is not None:
            after, of_rows = self.gk.exponents(head)
            keys = keys * jnp.exp(after)
        if self.gv is not None:
            after, of_columns = self.gv.exponents(head)
            values = values * jnp.exp(after)
        keys = keys.T
        if self.scalars is not None:
            bt = self.scalars.shape[1] - 1
            keys = keys * jnp.exp(self.scalars[head : head + 1, :bt])
            total = self.scalars[head : head + 1, bt:]
            of_columns = total if of_columns is None else of_columns + total
        return decay(state, of_rows, of_columns) + product(keys, values, self.k.dtype)


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


def sums_scratch(arrays: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """Scratch for the sums of gates per token: `<gate>_after` and `<gate>_total`."""
    shapes: dict[str, Any] = {}
    for name, channels in (("gk", sizes.K), ("gv", sizes.bv)):
        if sizes.raw and name in arrays:
            shapes[f"{name}_after"] = pltpu.VMEM((sizes.bt, sizes.bh, channels), jnp.float32)
            shapes[f"{name}_total"] = pltpu.VMEM((sizes.bh, channels), jnp.float32)
    return shapes


def chunk_of(refs: Mapping[str, Any], scratch: Mapping[str, Any], window: Window) -> Chunk:
    """The chunk in refs by name, its gates summed up in scratch where they are per token."""

    def gate(name: str) -> ChannelGate | None:
        if name not in refs:
            return None
        found = ChannelGate(refs[name], window, scratch.get(f"{name}_after"), scratch.get(f"{name}_total"))
        if found.after is not None:
            found.sum_up()
        return found

    return Chunk(refs["k"], refs["v"], window, gate("gk"), gate("gv"), refs.get("scalars"))


def copy_heads(to: Any, state: Any | None) -> None:
    """Copies states `[bh, K, V]` in vector memory, rounded if need be; 0 from None."""

    def copy(head: Any, _: Any) -> None:
        found = jnp.zeros(to.shape[1:], to.dtype) if state is None else state[head].astype(to.dtype)
        to[head] = found

    lax.fori_loop(0, to.shape[0], copy, None)

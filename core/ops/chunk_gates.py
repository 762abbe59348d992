"""Decay from log gates, always as the exponential of a sum that starts after the token it belongs to.

The state at the end of a row of tokens is `exp(total) * state + sum_r exp(after_r) k_r v_r^T`, where
`after_r` is the sum of the log gates after token r and `total` the sum of all of them. For gates that
decay, no exponent is positive, so nothing overflows however strong the decay is; and no two large sums
are subtracted where the gates are raw, so a gate of -inf is an exact reset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

RESET = -1e30
"""What -inf becomes in sums: its exponential is 0 too, and `0 * RESET` is 0."""


class Exponents(NamedTuple):
    """Exponents of the decay of rows of tokens; None where no gate acts.

    Attributes:
      k: of each token's key from the token to the end of its row, [B, R, S, H, K].
      v: of each token's value, [B, R, S, H, V] or [B, R, S, H, 1].
      state_k: of the state's key channels over a whole row, [B, R, H, K, 1].
      state_v: of the state's value channels, [B, R, H, 1, V] or [B, R, H, 1, 1].
    """

    k: jax.Array | None
    v: jax.Array | None
    state_k: jax.Array | None
    state_v: jax.Array | None


def exponents(
    gates: Mapping[str, jax.Array], lengths: jax.Array, span: int, chunk_size: int, raw: bool, full: bool
) -> Exponents:
    """The exponents of rows of tokens. The scalar gates act through the values, as `gv` does.

    Args:
      gates: any of `g` [B, R, S, H], `g_gamma` [H], `gk` [B, R, S, H, K], `gv` [B, R, S, H, V], float32 or
        float64. Whatever they hold past the length of a row is not read.
      lengths: valid tokens of each row, [B, R].
      span: S, a multiple of `chunk_size`.
      chunk_size: tokens over which cumulative gates run before they restart.
      raw: gates are per token instead of cumulative (`g_gamma` always is).
      full: every row is known to hold `span` valid tokens.
    """
    place = jnp.arange(span, dtype=jnp.int32)
    valid = None if full else place < lengths[..., None]
    after: dict[str, jax.Array] = {}
    total: dict[str, jax.Array] = {}
    for name in ("g", "gk", "gv"):
        if name in gates:
            after[name], total[name] = _after(gates[name], lengths, valid, chunk_size, raw)
    if "g_gamma" in gates:
        gamma = jnp.maximum(gates["g_gamma"], RESET)
        count = jnp.maximum(lengths[..., None] - 1 - place, 0).astype(gamma.dtype)
        after["g_gamma"] = count[..., None] * gamma
        total["g_gamma"] = lengths[..., None].astype(gamma.dtype) * gamma
    scalar = [name for name in ("g", "g_gamma") if name in after]
    for name in scalar:
        after[name], total[name] = after[name][..., None], total[name][..., None]
    on_v = [*scalar, *(name for name in ("gv",) if name in after)]
    return Exponents(
        k=after.get("gk"),
        v=_sum([after[name] for name in on_v]),
        state_k=total["gk"][..., None] if "gk" in total else None,
        state_v=_sum([total[name][..., None, :] for name in on_v]),
    )


def _after(
    gate: jax.Array, lengths: jax.Array, valid: jax.Array | None, chunk_size: int, raw: bool
) -> tuple[jax.Array, jax.Array]:
    """Sum of one gate [B, R, S, H, ...] after each token, and over all tokens of a row."""
    if valid is not None:
        valid = valid.reshape(*valid.shape, *(1,) * (gate.ndim - 3))
    if raw:
        gate = jnp.maximum(gate, RESET)
        gate = gate if valid is None else jnp.where(valid, gate, 0)
        return _sum_after(gate), gate.sum(2)

    # Cumulative gates restart every chunk; a row may span several.
    B, R, S = gate.shape[:3]
    chunks = gate.reshape(B, R, S // chunk_size, chunk_size, *gate.shape[3:])
    if valid is None:
        ends = chunks[:, :, :, -1]
    else:
        starts = chunk_size * jnp.arange(S // chunk_size, dtype=jnp.int32)
        last = jnp.clip(lengths[..., None] - starts, 0, chunk_size) - 1
        is_last = jnp.arange(chunk_size, dtype=jnp.int32) == last[..., None]
        is_last = is_last.reshape(*is_last.shape, *(1,) * (gate.ndim - 3))
        ends = jnp.where(is_last, chunks, 0).sum(3)
    after = ends[:, :, :, None] - chunks
    if chunk_size < S:
        after = after + _sum_after(ends)[:, :, :, None]
    after = after.reshape(gate.shape)
    return (after if valid is None else jnp.where(valid, after, 0)), ends.sum(2)


def _sum_after(array: jax.Array) -> jax.Array:
    """Exclusive suffix sums along axis 2, as a product with a triangle of ones."""
    size = array.shape[2]
    later = jnp.tri(size, k=-1, dtype=array.dtype)
    return jnp.einsum("sr,bns...->bnr...", later, array, precision=lax.Precision.HIGHEST)


def _sum(arrays: list[jax.Array]) -> jax.Array | None:
    return sum(arrays[1:], arrays[0]) if arrays else None


def decayed(array: jax.Array, exponent: jax.Array | None) -> jax.Array:
    """`array * exp(exponent)`."""
    return array if exponent is None else array * jnp.exp(exponent)

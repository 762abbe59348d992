"""The parameters of an attention, and which query row sees which key, apart from -inf entries of the bias."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from opmux.core.request import Operands, Request


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Static parameters of a canonical attention.

    Query row `t` sees key `s` of the same batch element only if `diagonal + t - left <= s <= diagonal + t + right`,
    where `None` is no bound and `diagonal` is 0, or `kv_length - q_length` where `bottom_right`.

    Attributes:
      scale: factor of the scores.
      left: keys seen before the diagonal.
      right: keys seen after the diagonal; causal is 0.
      bottom_right: the diagonal ends at the last valid key instead of starting at the first.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)` before bias and mask.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    bottom_right: bool = False
    soft_cap: float | None = None

    @property
    def banded(self) -> bool:
        """Whether any bound relative to the diagonal applies."""
        return self.left is not None or self.right is not None


_HIDING = ("mask", "bias", "q_lengths", "kv_lengths", "q_segments")
"""Operands that decide by their values which query sees which key."""


def lengths(request: Request, operands: Operands) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of each batch element the valid queries, the valid keys, and the key that query row 0 stands on, [B] int32."""
    (B, T), S = request["query"].shape[:2], request["key"].shape[1]
    q, kv = (
        operands.get(name, jnp.full((B,), size, jnp.int32)) for name, size in (("q_lengths", T), ("kv_lengths", S))
    )
    diagonal = kv - q if request.params.bottom_right else jnp.zeros((B,), jnp.int32)
    return jnp.minimum(q, T), jnp.minimum(kv, S), diagonal


def hides(request: Request) -> bool:
    """Whether a query may be kept from seeing a key that another one sees."""
    return request.params.banded or any(name in request for name in _HIDING)


def always_sees(request: Request) -> bool:
    """Whether every query is sure to see some key, whatever the operands hold."""
    params: AttentionParams = request.params
    T, S = request["query"].shape[1], request["key"].shape[1]
    if S == 0 or any(name in request for name in _HIDING):
        return False
    first = S - T if params.bottom_right else 0  # the keys that the first and the last query stand on
    last = first + T - 1
    return (params.right is None or first + params.right >= 0) and (params.left is None or last - params.left < S)


def visible(request: Request, operands: Operands) -> jax.Array:
    """True where a query may see a key; broadcasts to [B, N, T, S]."""
    T, S = request["query"].shape[1], request["key"].shape[1]
    rows = jnp.arange(T, dtype=jnp.int32)[None, :, None]
    columns = jnp.arange(S, dtype=jnp.int32)[None, None, :]
    seen = jnp.ones((1, 1, 1), bool)
    if "q_lengths" in operands:
        seen = seen & (rows < operands["q_lengths"][:, None, None])
    if "kv_lengths" in operands:
        seen = seen & (columns < operands["kv_lengths"][:, None, None])
    if request.params.banded:
        center = rows + lengths(request, operands)[2][:, None, None] if request.params.bottom_right else rows
        if request.params.left is not None:
            seen = seen & (columns >= center - request.params.left)
        if request.params.right is not None:
            seen = seen & (columns <= center + request.params.right)
    if "q_segments" in operands:
        seen = seen & (operands["q_segments"][:, :, None] == operands["kv_segments"][:, None, :])
    seen = seen[:, None]
    return seen & operands["mask"] if "mask" in operands else seen

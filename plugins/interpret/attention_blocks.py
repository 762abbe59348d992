"""What the forward and backward attention kernels share: layout and block sizes.

Both kernels work head-major, [B, K, G, T, H] for queries and [B, K, S, H] for keys, with the G query heads
that read one key/value head side by side, so that grouped heads are rows of one product and nothing is
repeated in memory. Inside they have three axes, [batch heads, rows, keys]: XLA's reductions take twice as long
with five. Inputs are whole arrays that the kernels slice: interpret mode copies an input back at
every grid step if its block moves, and costs nothing if it does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.indices import Scalar
from opmux.core.ops.attention import accumulator
from opmux.core.ops.attention_mask import lengths
from opmux.core.request import Operands, Request
from opmux.plugins.interpret.attention_config import AttentionConfig, divisor


@dataclass(frozen=True)
class Blocks:
    """Sizes of one attention problem and of its blocks.

    Attributes:
      batch: batch elements of a block; heads, q and kv likewise.
      T_padded: query rows rounded up to whole blocks.
      S_padded: keys rounded up to whole blocks.
    """

    request: Request
    B: int
    T: int
    S: int
    K: int
    G: int
    H: int
    Hv: int
    batch: int
    heads: int
    q: int
    kv: int
    T_padded: int = field(init=False)
    S_padded: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "T_padded", pl.cdiv(self.T, self.q) * self.q)
        object.__setattr__(self, "S_padded", pl.cdiv(self.S, self.kv) * self.kv)

    @classmethod
    def of(cls, request: Request, config: AttentionConfig) -> Blocks:
        """The blocks of a request whose arrays all have elements."""
        B, T, N, H = request["query"].shape
        S, K, Hv = request["value"].shape[1:]
        return cls(
            request, B, T, S, K, N // K, H, Hv,
            batch=divisor(B, config.block_batch), heads=divisor(K, config.block_heads),
            q=min(config.block_q, T), kv=min(config.block_kv, S),
        )  # fmt: skip

    @property
    def grid(self) -> tuple[int, int, int]:
        """Blocks along batch, heads and queries."""
        return self.B // self.batch, self.K // self.heads, self.T_padded // self.q

    @property
    def channels(self) -> int:
        """Channels of queries and keys as `with_channels` leaves them."""
        return max(self.H, 1)

    @property
    def value_channels(self) -> int:
        """Channels of the values as `with_channels` leaves them."""
        return max(self.Hv, 1)

    @property
    def dtype(self) -> Any:
        """Dtype of everything inside the kernels."""
        return accumulator(self.request["query"].dtype)

    def rows(self, array: jax.Array, fill: float = 0) -> jax.Array:
        """[B, T, N, ...] to [B, K, G, T_padded, ...]."""
        array = array.reshape(self.B, self.T, self.K, self.G, *array.shape[3:])
        return _pad(jnp.moveaxis(array, 1, 3), 3, self.T_padded, fill)

    def unrows(self, array: jax.Array) -> jax.Array:
        """The inverse of `rows`, dtype apart."""
        array = jnp.moveaxis(array[:, :, :, : self.T], 3, 1)
        return array.reshape(self.B, self.T, self.K * self.G, *array.shape[4:])

    def keys(self, array: jax.Array) -> jax.Array:
        """[B, S, K, H] to [B, K, S_padded, H]."""
        return _pad(jnp.moveaxis(array, 1, 2), 2, self.S_padded, 0)

    def scores(self, array: jax.Array) -> jax.Array:
        """[#B, #N, #T, #S] to [#B, #K, #G, #T_padded, #S_padded]; axes of size one stay."""
        b, n, t, s = array.shape
        heads = (1, 1) if n == 1 else (self.K, self.G)
        array = array.reshape(b, *heads, t, s)
        array = array if t == 1 else _pad(array, 3, self.T_padded, 0)
        return array if s == 1 else _pad(array, 4, self.S_padded, 0)


def with_channels(array: jax.Array) -> jax.Array:
    """The array with one channel of zeros if it has none: Pallas has no arrays without elements."""
    return _pad(array, array.ndim - 1, max(array.shape[-1], 1), 0)


def product(lhs: jax.Array, rhs: jax.Array, *, transposed: bool = False) -> jax.Array:
    """`lhs @ rhs` for each head: [heads, X, Y] by [heads, Y, Z], or by [heads, Z, Y] if `transposed`."""
    dimensions = (((2,), (2 if transposed else 1,)), ((0,), (0,)))
    return lax.dot_general(
        lhs, rhs, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=accumulator(lhs.dtype)
    )


def grid_start(blocks: Blocks, axis: int) -> Scalar:
    """First batch element (0), head (1) or query (2) of the running grid step; an int if there is one step."""
    size = (blocks.batch, blocks.heads, blocks.q)[axis]
    return pl.program_id(axis) * size if blocks.grid[axis] > 1 else 0


def _pad(array: jax.Array, axis: int, size: int, fill: float) -> jax.Array:
    if array.shape[axis] == size:
        return array
    widths = [(0, size - array.shape[axis] if i == axis else 0) for i in range(array.ndim)]
    return jnp.pad(array, widths, constant_values=fill)


def masks(blocks: Blocks, operands: Operands) -> dict[str, jax.Array]:
    """The operands that decide who sees whom, in the kernels' layout."""
    request = blocks.request
    arrays: dict[str, jax.Array] = {}
    if "q_lengths" in operands or "kv_lengths" in operands:
        arrays["lengths"] = jnp.stack(lengths(request, operands))
    if "q_segments" in operands:
        arrays["q_segments"] = _pad(operands["q_segments"], 1, blocks.T_padded, 0)
        arrays["kv_segments"] = _pad(operands["kv_segments"], 1, blocks.S_padded, 0)
    if "bias" in operands:
        arrays["bias"] = blocks.scores(operands["bias"].astype(blocks.dtype))
    if "mask" in operands:
        arrays["mask"] = blocks.scores(operands["mask"])
    return arrays

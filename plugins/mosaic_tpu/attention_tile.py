"""One block of an attention's scores, as its kernel sees it: what they are, and who sees whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.indices import Scalar
from opmux.core.ops.attention_mask import AttentionParams
from opmux.plugins.mosaic_tpu.attention_tiling import Bounds, Tiling
from opmux.plugins.mosaic_tpu.dense_config import LANES


@dataclass(frozen=True)
class Exponent:
    """In what unit scores are exponents: of 2, which saves a product each, unless a bias may be as low as float32 goes.

    Attributes:
      params: the attention's.
      biased: there is a bias.
    """

    params: AttentionParams
    biased: bool

    @property
    def unit(self) -> float:
        """Scores in this unit, for one of a natural exponent."""
        return 1.0 if self.biased else math.log2(math.e)

    def scores(self, products: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Scores without bias, of products of queries and keys; and the hyperbolic tangents of a soft cap."""
        cap = self.params.soft_cap
        if cap is None:
            return products * (self.params.scale * self.unit), None
        capped = jnp.tanh(products * (self.params.scale / cap))
        return capped * (cap * self.unit), capped

    def power(self, scores: jax.Array) -> jax.Array:
        """The weights of scores."""
        return jnp.exp(scores) if self.biased else jnp.exp2(scores)


@dataclass(frozen=True)
class Tile:
    """The scores of query block `i` and key block `j`, keys down and query rows across.

    Attributes:
      tiling: the tiling.
      refs: refs of the blocks, by name.
      bounds: of the batch element.
      place: the block's number among those of keys that the refs hold.
    """

    tiling: Tiling
    refs: dict[str, Any]
    bounds: Bounds
    i: Scalar
    j: Scalar
    place: Scalar = 0

    def rows(self, chunk: Scalar) -> Any:
        """Index of a chunk of query rows."""
        return span(chunk, self.tiling.chunk)

    def keys(self, part: int = 0, size: int | None = None) -> Any:
        """Index of the block's keys, or of a part of `size` of them."""
        size = size or self.tiling.kv
        return span(self.place * (self.tiling.kv // size) + part, size)

    def bias(self, chunk: Scalar, part: int = 0, size: int | None = None) -> jax.Array:
        """The bias of a chunk of query rows and a part of the keys; broadcasts to [size, chunk]."""
        return self._spread("bias", chunk, part, size).astype(jnp.float32)

    def seen(self, chunk: Scalar, part: int = 0, size: int | None = None, *, valid_rows: bool = False) -> jax.Array:
        """Which keys of a part a chunk of query rows sees, [size, chunk].

        With `valid_rows`, rows that are no queries see none.
        """
        tiling, params, bounds = self.tiling, self.tiling.params, self.bounds
        shape = (size or tiling.kv, tiling.chunk)
        key, row = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        first_key, first_row = self.j * tiling.kv + part * shape[0], self.i * tiling.q + chunk * tiling.chunk
        seen: list[jax.Array] = []
        if tiling.ragged_keys:
            seen.append(key < bounds.kv - first_key)
        if valid_rows and (tiling.lengths or tiling.T % tiling.q):
            seen.append(row < bounds.q - first_row)
        if params.banded:
            apart, center = key - row, first_row + bounds.diagonal - first_key
            if params.left is not None:
                seen.append(apart >= center - params.left)
            if params.right is not None:
                seen.append(apart <= center + params.right)
        if "q_segments" in self.refs:
            q, kv = (self._spread(name, chunk, part, size) for name in ("q_segments", "kv_segments"))
            seen.append(q == kv)
        if "mask" in self.refs:
            mask = self._spread("mask", chunk, part, size).astype(jnp.int32)
            seen.append(jnp.broadcast_to(mask != 0, shape))
        if "bias" in self.refs:
            seen.append(jnp.broadcast_to(self.bias(chunk, part, size) != -jnp.inf, shape))
        found = seen[0]
        for each in seen[1:]:
            found = found & each
        return found

    def without_tail_keys(self, array: jax.Array, axis: int, part: int = 0) -> jax.Array:
        """A part of the block with 0 in place of what lies past the last key: a weight of 0 does not hide NaN."""
        tiling = self.tiling
        if not tiling.ragged_keys:
            return array
        first = self.j * tiling.kv + part * array.shape[axis]
        valid = lax.broadcasted_iota(jnp.int32, array.shape, axis) < self.bounds.kv - first
        return jnp.where(valid, array.astype(jnp.float32), 0).astype(array.dtype)

    def without_tail_rows(self, array: jax.Array, chunk: Scalar) -> jax.Array:
        """The chunk with 0 in place of what lies past the last query row, along lanes."""
        tiling = self.tiling
        if not (tiling.lengths or tiling.T % tiling.q):
            return array
        return jnp.where(self.valid_rows(chunk, array.shape), array.astype(jnp.float32), 0).astype(array.dtype)

    def valid_rows(self, chunk: Scalar, shape: tuple[int, ...]) -> jax.Array:
        """Which query rows, along lanes, are none of those that lie past the end."""
        first = self.i * self.tiling.q + chunk * self.tiling.chunk
        return lax.broadcasted_iota(jnp.int32, shape, 1) < self.bounds.q - first

    def _spread(self, name: str, chunk: Scalar, part: int, size: int | None) -> jax.Array:
        """The block of an operand for a chunk of query rows and a part of the keys, with as many lanes as rows."""
        ref = self.refs[name]
        if self._column(name):
            return jnp.tile(ref[self.keys(part, size), :], (1, self.tiling.chunk // LANES))
        return ref[:, self.rows(chunk)] if ref.shape[0] == 1 else ref[self.keys(part, size), self.rows(chunk)]

    def _column(self, name: str) -> bool:
        """Whether an operand has one number for a key, and copies of it along lanes."""
        if name in ("q_segments", "kv_segments"):
            return name == "kv_segments"
        return self.tiling.request[name].shape[2] == 1 and self.tiling.request[name].shape[3] > 1


def span(number: Scalar, size: int) -> Any:
    """Index of a block of `size` by its number."""
    if isinstance(number, int):
        return slice(number * size, (number + 1) * size)
    return pl.ds(pl.multiple_of(number * size, size), size)

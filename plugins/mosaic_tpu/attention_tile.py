"""One block of an attention's scores, as its kernel sees it: what they are, and who sees whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from opmux.core.ops.attention_mask import AttentionParams
from opmux.plugins.mosaic_tpu.attention_tiling import Bounds, Scalar, Tiling
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
      refs: refs of the blocks made by `masks`.
      bounds: of the batch element.
    """

    tiling: Tiling
    refs: dict[str, Any]
    bounds: Bounds
    i: Scalar
    j: Scalar

    def chunks(self) -> list[slice]:
        """The chunks of query rows."""
        size = self.tiling.chunk
        return [slice(start, start + size) for start in range(0, self.tiling.q, size)]

    def bias(self, rows: slice) -> jax.Array:
        """The bias of some query rows; broadcasts to [kv, chunk]."""
        return self._spread("bias", rows).astype(jnp.float32)

    def seen(self, rows: slice, valid_rows: bool = False) -> jax.Array:
        """Which keys some query rows see, [kv, chunk]; with `valid_rows`, rows that are no queries see none."""
        tiling, params, bounds = self.tiling, self.tiling.params, self.bounds
        shape = (tiling.kv, tiling.chunk)
        key, row = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
        first_key, first_row = self.j * tiling.kv, self.i * tiling.q + rows.start
        seen: list[jax.Array] = []
        if tiling.lengths or tiling.S % tiling.kv:
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
            seen.append(self._spread("q_segments", rows) == self._spread("kv_segments", rows))
        if "mask" in self.refs:
            seen.append(jnp.broadcast_to(self._spread("mask", rows).astype(jnp.int32) != 0, shape))
        if "bias" in self.refs:
            seen.append(jnp.broadcast_to(self.bias(rows) != -jnp.inf, shape))
        found = seen[0]
        for each in seen[1:]:
            found = found & each
        return found

    def valid_keys(self, axis: int, shape: tuple[int, int]) -> jax.Array:
        """Which keys are none of those that lie past the end, where anything may be; keys lie along `axis`."""
        return lax.broadcasted_iota(jnp.int32, shape, axis) < self.bounds.kv - self.j * self.tiling.kv

    def valid_rows(self, rows: slice, shape: tuple[int, int]) -> jax.Array:
        """Which query rows, along lanes, are none of those that lie past the end."""
        first = self.i * self.tiling.q + rows.start
        return lax.broadcasted_iota(jnp.int32, shape, 1) < self.bounds.q - first

    def without_tail_keys(self, array: jax.Array, axis: int) -> jax.Array:
        """The block with 0 in place of what lies past the last key: a weight of 0 does not hide NaN."""
        tiling = self.tiling
        if not (tiling.lengths or tiling.S % tiling.kv):
            return array
        wide = jnp.where(self.valid_keys(axis, array.shape), array.astype(jnp.float32), 0)
        return wide.astype(array.dtype)

    def without_tail_rows(self, array: jax.Array, rows: slice) -> jax.Array:
        """The chunk with 0 in place of what lies past the last query row, along lanes."""
        tiling = self.tiling
        if not (tiling.lengths or tiling.T % tiling.q):
            return array
        return jnp.where(self.valid_rows(rows, array.shape), array.astype(jnp.float32), 0).astype(array.dtype)

    def _spread(self, name: str, rows: slice) -> jax.Array:
        """The block of an operand for some query rows, with as many lanes as rows."""
        ref = self.refs[name]
        return jnp.tile(ref[...], (1, self.tiling.chunk // LANES)) if self._column(name) else ref[:, rows]

    def _column(self, name: str) -> bool:
        """Whether an operand has one number for a key, and copies of it along lanes."""
        if name in ("q_segments", "kv_segments"):
            return name == "kv_segments"
        return self.tiling.request[name].shape[2] == 1 and self.tiling.request[name].shape[3] > 1

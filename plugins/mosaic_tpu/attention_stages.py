"""The three stages that an item of the attention forward, a block of keys and a chunk of query rows, goes through."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.indices import Scalar, smallest
from opmux.plugins.mosaic_tpu import attention_operands as lay
from opmux.plugins.mosaic_tpu.attention_tile import Exponent, Tile
from opmux.plugins.mosaic_tpu.attention_tiling import Tiling, quotient, when
from opmux.plugins.mosaic_tpu.dense_config import SUBLANES

LOWEST = float(np.finfo(np.float32).min)
"""The top of a row that has seen nothing: what is hidden is lower, at -inf, and weighs 0 beside it."""


@dataclass(frozen=True)
class Stages:
    """Adds blocks of keys to what the query rows of a block have seen.

    Attributes:
      tiling: the tiling.
      refs: refs of blocks and scratch memory.
      tile: the block of keys of a number, with all query rows.
      part_kv: keys that the stages take at a time.
      masked: rows may not see all keys of a block.
    """

    tiling: Tiling
    refs: dict[str, Any]
    tile: Callable[[Scalar], Tile]
    part_kv: int
    masked: bool

    def run(self, count: Scalar) -> None:
        """Adds blocks 0 to `count`."""
        if isinstance(count, int) and count <= 0:
            return
        items = count * self.tiling.chunks
        several = items > 1 if isinstance(items, int) or self.tiling.chunks == 1 else True

        def add() -> None:
            self._turn(next=0)
            self._turn(current=0, next=smallest(1, items - 1))
            lax.fori_loop(jnp.int32(1), jnp.int32(items - 1), lambda w, _: self._turn(w - 1, w, w + 1), None)
            when(several, lambda: self._turn(items - 2, items - 1))
            self._turn(items - 1)

        when(True if isinstance(count, int) else count > 0, add)

    def _turn(self, done: Scalar | None = None, current: Scalar | None = None, next: Scalar | None = None) -> None:
        """One turn of the loop: a stage for each of up to three items.

        Within each part of the keys buffers are read before they are written.
        """
        refs, size = self.refs, math.gcd(self.part_kv, self.tiling.kv)
        exponent = Exponent(self.tiling.params, "bias" in refs)
        rescale = refs["rescale"][...]
        top, more, sums = None, None, None
        if current is not None:
            top = self._raise_top(exponent, current)
        for part in range(self.tiling.kv // size):
            here = slice(part * size, (part + 1) * size)
            if done is not None:
                value = self._values(self._item(done)[0], part, size)
                product = lay.product(value, refs["weights"][here, :], (1, 0))
                more = product if more is None else more + product
            if top is not None:
                weights = exponent.power(refs["scores"][here, :] - top)
                refs["weights"][here, :] = weights.astype(refs["weights"].dtype)
                if "sums" in refs:
                    some = jnp.sum(weights.reshape(size // SUBLANES, SUBLANES, -1), axis=0)
                    sums = some if sums is None else sums + some
            if next is not None:
                self._score(exponent, next, part, size)
        if sums is not None:
            tile, chunk = self._item(current)
            rows = tile.rows(chunk)
            refs["sums"][:, rows] = refs["sums"][:, rows] * refs["rescale"][...] + sums
        if more is not None:
            tile, chunk = self._item(done)
            rows = tile.rows(chunk)
            refs["acc"][:, rows] = refs["acc"][:, rows] * rescale + more

    def _item(self, number: Any) -> tuple[Tile, Scalar]:
        chunks = self.tiling.chunks
        block = quotient(number, chunks)
        return self.tile(block), number - block * chunks

    def _raise_top(self, exponent: Exponent, item: Scalar) -> jax.Array:
        refs = self.refs
        tile, chunk = self._item(item)
        rows = tile.rows(chunk)
        old = refs["top"][:, rows]
        top = jnp.maximum(old, jnp.max(refs["tops"][...], axis=0, keepdims=True))
        refs["top"][:, rows] = top
        refs["rescale"][...] = exponent.power(old - top)
        return top

    def _score(self, exponent: Exponent, item: Scalar, part: int, size: int) -> None:
        refs = self.refs
        tile, chunk = self._item(item)
        key, query = refs["key"][tile.keys(part, size), :], refs["query"][:, tile.rows(chunk)]
        scores, _ = exponent.scores(lay.product(key, query, (1, 0)))
        if "bias" in refs:
            scores = scores + tile.bias(chunk, part, size)
        if self.masked:
            scores = jnp.where(tile.seen(chunk, part, size), scores, -jnp.inf)
        refs["scores"][part * size : (part + 1) * size, :] = scores
        # Down sublanes only at the end.
        tops = jnp.max(scores.reshape(size // SUBLANES, SUBLANES, -1), axis=0)
        refs["tops"][...] = tops if part == 0 else jnp.maximum(refs["tops"][...], tops)

    def _values(self, tile: Tile, part: int, size: int) -> jax.Array:
        """Values, without what lies past the end or, where keys may be hidden, is not finite: 0 * NaN is NaN."""
        value = self.refs["value"][:, tile.keys(part, size)]
        if not self.masked:
            return value
        value = tile.without_tail_keys(value, 1, part)
        if not self.tiling.hides:
            return value
        wide = value.astype(jnp.float32)
        # Not as a choice: the compiler makes that part of the product, which its estimator for v5e does not know.
        kept = lax.bitcast_convert_type(wide, jnp.int32) & jnp.where(_not_finite(wide), 0, -1)
        return lax.bitcast_convert_type(kept, jnp.float32).astype(value.dtype)

    def poison(self, count: Scalar) -> None:
        """Makes NaN what NaN and infinite values of blocks 0 to `count` give, in the rows that see them."""
        refs, tiling = self.refs, self.tiling
        if isinstance(count, int) and count <= 0:
            return

        def block(number: Any, _: Any) -> None:
            tile = self.tile(number)
            value = tile.without_tail_keys(refs["value"][:, tile.keys()], 1).astype(jnp.float32)
            bad = jnp.where(_not_finite(value), 1.0, 0.0)

            @pl.when(jnp.max(bad) > 0)
            def _():
                for chunk in range(tiling.chunks):
                    rows = tile.rows(chunk)
                    seen = jnp.where(tile.seen(chunk), 1.0, 0.0).astype(refs["value"].dtype)
                    hit = lay.product(bad.astype(seen.dtype), seen, (1, 0)) > 0
                    refs["acc"][:, rows] = jnp.where(hit, jnp.nan, refs["acc"][:, rows])

        lax.fori_loop(jnp.int32(0), jnp.int32(count), block, None)


def _not_finite(array: jax.Array) -> jax.Array:
    return array * 0 != 0

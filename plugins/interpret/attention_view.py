"""Which keys the query rows of one attention block see, as its kernel finds out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.indices import Scalar, largest, smallest
from opmux.plugins.interpret.attention_blocks import Blocks


@dataclass(frozen=True)
class View:
    """The query rows of one block, as its kernel sees them.

    Attributes:
      blocks: the problem.
      refs: refs of the arrays made by `masks`.
      b: first batch element.
      h: first key/value head.
      t: first query row.
    """

    blocks: Blocks
    refs: dict[str, Any]
    b: Scalar
    h: Scalar
    t: Scalar

    @property
    def heads(self) -> tuple[Any, Any]:
        """Index of the block's batch elements and heads."""
        return pl.ds(self.b, self.blocks.batch), pl.ds(self.h, self.blocks.heads)

    @property
    def rows(self) -> int:
        """Rows of a block of scores: its queries for each of the query heads of a key/value head."""
        return self.blocks.G * self.blocks.q

    def queries(self, name: str) -> jax.Array:
        """The block's rows of an array of queries: [batch heads, rows, channels]."""
        block = self.refs[name][*self.heads, :, pl.ds(self.t, self.blocks.q)]
        return block.reshape(-1, self.rows, *block.shape[4:])

    def queries_t(self, name: str) -> jax.Array:
        """The block's rows of an array of transposed queries: [batch heads, channels, rows]."""
        block = self.refs[name][*self.heads, :, :, pl.ds(self.t, self.blocks.q)]
        return block.reshape(-1, block.shape[2], self.rows)

    def keys(self, name: str, s: Scalar) -> jax.Array:
        """The block of keys from `s` on of an array of keys or values: [batch heads, kv, channels]."""
        block = self.refs[name][*self.heads, pl.ds(s, self.blocks.kv)]
        return block.reshape(-1, *block.shape[2:])

    def spread(self, array: jax.Array) -> jax.Array:
        """[#batch, #heads, #G, #q, X] to [batch heads, rows, X]."""
        blocks = self.blocks
        shape = (blocks.batch, blocks.heads, blocks.G, blocks.q, array.shape[4])
        return jnp.broadcast_to(array, shape).reshape(-1, self.rows, array.shape[4])

    def length(self, which: int) -> Any:
        """Valid queries (0) or keys (1), or the diagonal (2), of each batch element: [batch, 1, 1, 1, 1], or an int."""
        blocks, params = self.blocks, self.blocks.request.params
        if "lengths" not in self.refs:
            return (blocks.T, blocks.S, blocks.S - blocks.T if params.bottom_right else 0)[which]
        return self.refs["lengths"][which, pl.ds(self.b, blocks.batch)].reshape(-1, 1, 1, 1, 1)

    def valid_rows(self) -> jax.Array | None:
        """Which rows are valid queries, [batch heads, rows, 1]; None if all that will be read are."""
        if "lengths" not in self.refs:
            return None
        return self.spread(self.t + _iota(self.blocks.q, 3) < self.length(0))

    def walk(self, step: Callable[[Scalar, bool, Any], Any], start: Callable[[], Any]) -> Any:
        """Folds `step(first key, masked, carry)` over the key blocks that any row of the block sees.

        `masked` is false where every valid row sees every key. The order of the blocks is no matter to an online
        softmax, so the partly seen ones on both sides share one loop. A lone step gets None for `start()`.
        """
        blocks, size = self.blocks, self.blocks.kv
        first, low, high, last = self.bounds()
        if blocks.S_padded == size:
            return step(0, not (isinstance(high, int) and low < high), None)
        carry = start()
        if not self.selective:
            carry = loop(low, high, lambda j, c: step(j * size, False, c), carry)
        # The first of the others come before the entirely seen ones.
        before = low - first

        def edge(j: Scalar, c: Any) -> Any:
            j = j + (high if isinstance(before, int) and not before else jnp.where(j < before, first, high - before))
            if not self.selective:
                return step(j * size, True, c)
            return lax.cond(self._seen(j * size).any(), lambda c: step(j * size, True, c), lambda c: c, c)

        return loop(0, before + largest(last - high, 0), edge, carry)

    def bounds(self) -> tuple[Scalar, Scalar, Scalar, Scalar]:
        """Key blocks: some row sees those from the first number to the last, all rows those between the inner two."""
        blocks, params, size = self.blocks, self.blocks.request.params, self.blocks.kv
        q_length, kv_length, center = (self.length(i) for i in range(3))
        end = smallest(self.t + blocks.q, _top(q_length))
        # Keys that some row sees, then keys that all rows see.
        some, every = (0, _top(kv_length)), (0, _bottom(kv_length))
        if params.left is not None:
            some = largest(some[0], self.t + _bottom(center) - params.left), some[1]
            every = largest(every[0], end - 1 + _top(center) - params.left), every[1]
        if params.right is not None:
            some = some[0], smallest(some[1], end + _top(center) + params.right)
            every = every[0], smallest(every[1], self.t + 1 + _bottom(center) + params.right)
        first, last = some[0] // size, largest(some[1] + size - 1, 0) // size
        if "lengths" in self.refs:
            last = jnp.where(self.t < end, last, first)
        if self.selective:
            return first, first, first, last
        low = first if params.left is None else smallest(largest((every[0] + size - 1) // size, first), last)
        return first, low, largest(smallest(every[1] // size, last), low), last

    @property
    def selective(self) -> bool:
        """Whether contents of arrays decide who sees whom, so that a block may turn out to be empty."""
        return "mask" in self.refs or "q_segments" in self.refs or "bias" in self.refs

    def seen(self, s: Scalar) -> jax.Array:
        """Who sees the keys from `s` on: [batch heads, rows, kv]."""
        return self.spread(self._seen(s))

    def bias(self, s: Scalar) -> jax.Array:
        """The bias of the keys from `s` on: broadcasts to [batch heads, rows, kv]."""
        bias = self.refs["bias"][self.at("bias", s)]
        return self.spread(jnp.broadcast_to(bias, (*bias.shape[:4], self.blocks.kv)))

    def _seen(self, s: Scalar) -> jax.Array:
        blocks, params, refs = self.blocks, self.blocks.request.params, self.refs
        rows, columns = self.t + _iota(blocks.q, 3), s + _iota(blocks.kv, 4)
        seen = columns < self.length(1)
        if params.left is not None:
            seen = seen & (columns >= rows + self.length(2) - params.left)
        if params.right is not None:
            seen = seen & (columns <= rows + self.length(2) + params.right)
        if "q_segments" in refs:
            q = refs["q_segments"][pl.ds(self.b, blocks.batch), pl.ds(self.t, blocks.q)]
            kv = refs["kv_segments"][pl.ds(self.b, blocks.batch), pl.ds(s, blocks.kv)]
            seen = seen & (q[:, None, None, :, None] == kv[:, None, None, None, :])
        if "mask" in refs:
            seen = seen & refs["mask"][self.at("mask", s)]
        return seen & (refs["bias"][self.at("bias", s)] != -jnp.inf) if "bias" in refs else seen

    def at(self, name: str, s: Scalar) -> tuple[Any, ...]:
        """Index of the block with the keys from `s` on in an array of scores."""
        blocks = self.blocks
        starts = (self.b, self.h, 0, self.t, s)
        sizes = (blocks.batch, blocks.heads, blocks.G, blocks.q, blocks.kv)
        shape = self.refs[name].shape
        return tuple(slice(None) if shape[i] == 1 else pl.ds(starts[i], sizes[i]) for i in range(5))


def _iota(size: int, axis: int) -> jax.Array:
    shape = [1] * 5
    shape[axis] = size
    return lax.broadcasted_iota(jnp.int32, tuple(shape), axis)


def loop(start: Scalar, stop: Scalar, body: Callable[[Scalar, Any], Any], carry: Any) -> Any:
    """A `fori_loop` that leaves no loop behind where it runs at most once for sure."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= 1:
        return body(start, carry) if start < stop else carry
    return lax.fori_loop(jnp.int32(start), jnp.int32(stop), body, carry)


def _top(value: Any) -> Scalar:
    return value if isinstance(value, int) else jnp.max(value)


def _bottom(value: Any) -> Scalar:
    return value if isinstance(value, int) else jnp.min(value)

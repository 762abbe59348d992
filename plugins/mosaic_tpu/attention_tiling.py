"""Which blocks of keys a block of query rows sees: arithmetic on the indices of an attention's grid.

The grid is (batch, key/value heads, query heads of each, blocks of queries, blocks of keys). Lengths that are
operands lie in SMEM, so a bound is an int where every call has the same, and a traced int32 elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.indices import Scalar, largest, smallest
from opmux.core.ops.attention_mask import AttentionParams, lengths
from opmux.core.request import Operands, Request
from opmux.plugins.mosaic_tpu.dense_config import LANES, round_up


@dataclass(frozen=True)
class Bounds:
    """Valid query rows and keys of one batch element, and the key that query row 0 stands on."""

    q: Scalar
    kv: Scalar
    diagonal: Scalar


@dataclass(frozen=True)
class Tiling:
    """Sizes of an attention and of its blocks.

    Attributes:
      q: query rows of a block, a multiple of 128.
      kv: keys of a block, a multiple of 128.
      chunk: query rows whose scores are made at a time, a divisor of `q`.
      first_key: the keys are those of a longer sequence from this one on.
    """

    request: Request
    B: int
    T: int
    S: int
    K: int
    G: int
    H: int
    Hv: int
    q: int
    kv: int
    chunk: int
    first_key: int = 0

    @classmethod
    def of(
        cls, request: Request, block_q: int, block_kv: int, chunk_q: int, keys: tuple[int, int] | None = None
    ) -> Tiling:
        """The tiling of a request whose arrays all have elements, over keys `keys[0]` to `keys[1]`."""
        B, T, N, H = request["query"].shape
        S, K, Hv = request["value"].shape[1:]
        start, stop = keys or (0, S)
        q, kv = min(block_q, round_up(T, LANES)), min(block_kv, round_up(stop - start, LANES))
        return cls(request, B, T, stop - start, K, N // K, H, Hv, q, kv, math.gcd(q, chunk_q), start)

    @property
    def params(self) -> AttentionParams:
        """Parameters of the attention."""
        return self.request.params

    @property
    def grid(self) -> tuple[int, int, int, int, int]:
        """Batch elements, key/value heads, query heads of each, blocks of queries, blocks of keys."""
        return self.B, self.K, self.G, -(-self.T // self.q), -(-self.S // self.kv)

    @property
    def chunks(self) -> int:
        """Chunks of a block of query rows."""
        return self.q // self.chunk

    @property
    def lengths(self) -> bool:
        """Whether operands say how many queries and keys are valid."""
        return "q_lengths" in self.request or "kv_lengths" in self.request

    @property
    def selective(self) -> bool:
        """Whether contents of operands decide who sees whom, so that any block may hide some keys from some rows."""
        return any(name in self.request for name in ("mask", "bias", "q_segments"))

    @property
    def ragged_keys(self) -> bool:
        """Whether a block of keys may reach past the last key."""
        return self.lengths or self.S % self.kv != 0

    @property
    def hides(self) -> bool:
        """Whether a row may not see a key that another row of its block sees."""
        return self.selective or self.params.banded

    def prefetched(self, operands: Operands) -> list[jax.Array]:
        """What goes to SMEM ahead of the grid: valid queries, valid keys and diagonals of all batch elements, flat."""
        if not self.lengths:
            return []
        q, kv, diagonal = lengths(self.request, operands)
        kv = jnp.clip(kv - self.first_key, 0, self.S)
        return [jnp.concatenate([q, kv, diagonal - self.first_key])]

    def bounds(self, b: Scalar, prefetched: tuple[Any, ...]) -> Bounds:
        """The bounds of a batch element."""
        if prefetched:
            (lengths,) = prefetched
            return Bounds(lengths[b], lengths[self.B + b], lengths[2 * self.B + b])
        whole = self.request["key"].shape[1]
        return Bounds(self.T, self.S, (whole - self.T if self.params.bottom_right else 0) - self.first_key)

    def seen(self, i: Scalar, bounds: Bounds) -> tuple[Scalar, Scalar]:
        """The first key that any row of query block `i` sees, and the one after the last; there may be none."""
        start = i * self.q
        low: Scalar = 0
        high = bounds.kv
        if self.params.left is not None:
            low = largest(start + bounds.diagonal - self.params.left, 0)
        if self.params.right is not None:
            end = smallest(start + self.q, bounds.q)
            high = smallest(high, end + bounds.diagonal + self.params.right)
        if self.lengths:
            high = jnp.where(start < bounds.q, high, 0)
        return low, high

    def runs(self, i: Scalar, j: Scalar, bounds: Bounds) -> Any:
        """Whether any row of query block `i` may see any key of block `j`."""
        if not (self.params.banded or self.lengths):
            return True
        low, high = self.seen(i, bounds)
        conditions: list[Any] = [j * self.kv < high]
        return all_of(conditions if self.params.left is None else [*conditions, (j + 1) * self.kv > low, low < high])

    def whole(self, i: Scalar, j: Scalar, bounds: Bounds, rows: bool = False) -> Any:
        """Whether every row of query block `i` sees every key of block `j`; with `rows`, all rows must be valid too."""
        if self.selective:
            return False
        conditions: list[Any] = []
        if self.ragged_keys:
            conditions.append((j + 1) * self.kv <= bounds.kv)
        if rows and (self.lengths or self.T % self.q):
            conditions.append((i + 1) * self.q <= bounds.q)
        apart = j * self.kv - i * self.q - bounds.diagonal
        if self.params.left is not None:
            conditions.append(apart >= self.q - 1 - self.params.left)
        if self.params.right is not None:
            conditions.append(apart + self.kv - 1 <= self.params.right)
        return all_of(conditions)

    def ranges(self, i: Scalar, bounds: Bounds, first_block: Scalar, blocks: int) -> tuple[Scalar, ...]:
        """Of `blocks` blocks of keys: some row of query block `i` sees those from the first bound to the last, and
        every row those between the inner two.
        """
        low, high = self.seen(i, bounds)
        first, last = quotient(low, self.kv), quotient(largest(high, 0) + (self.kv - 1), self.kv)
        start = i * self.q + bounds.diagonal
        low, high = 0, bounds.kv
        if self.params.left is not None:
            low = largest(start + (self.q - 1) - self.params.left, 0)
        if self.params.right is not None:
            high = largest(smallest(high, start + self.params.right + 1), 0)
        whole = quotient(low + (self.kv - 1), self.kv), quotient(high, self.kv)
        if self.selective:
            whole = first, first
        begin = clip(whole[0], first, last)
        found = first, begin, clip(whole[1], begin, largest(last, begin)), largest(last, begin)
        return tuple(clip(each, first_block, first_block + blocks) for each in found)

    def key_block(self, i: Scalar, j: Scalar, bounds: Bounds) -> Scalar:
        """The block of keys to hold at a step: a step that sees none stays where its neighbour is, and copies none."""
        if not (self.params.banded or self.lengths):
            return j
        low, high = self.seen(i, bounds)
        first, last = quotient(low, self.kv), quotient(largest(high - 1, 0), self.kv)
        return clip(clip(j, first, last), 0, self.grid[4] - 1)


def all_of(conditions: list[Any]) -> Any:
    """The conjunction; a Python bool where nothing depends on the grid."""
    found: Any = True
    for condition in conditions:
        if isinstance(condition, bool):
            found = found if condition else False
        elif found is not False:
            found = condition if found is True else found & condition
    return found


def opposite(condition: Any) -> Any:
    """The negation; a Python bool of one."""
    return not condition if isinstance(condition, bool) else jnp.logical_not(condition)


def when(condition: Any, body: Callable[[], None]) -> None:
    """`body()` under a condition, which is a branch only where it depends on the grid."""
    if condition is True:
        body()
    elif condition is not False:
        pl.when(condition)(body)


def clip(a: Scalar, low: Scalar, high: Scalar) -> Scalar:
    """The index nearest to `a` from `low` to `high`; `low` where they leave none."""
    return largest(smallest(a, high), low)


def quotient(a: Scalar, b: int) -> Scalar:
    """`a // b` of an index that is not negative: a shift where it can be one."""
    if isinstance(a, int):
        return a // b
    return lax.shift_right_logical(a, jnp.int32(b.bit_length() - 1)) if b & (b - 1) == 0 else lax.div(a, jnp.int32(b))

"""What the attention kernels of a GPU share: sizes, and which blocks a tile meets.

Queries are cut into tiles, and keys into blocks that stream past each; in one of the backward kernels it is the
other way around. Of the blocks that some row of a tile sees, those that every row sees in full need no mask:

    first      low            high      last
      │ masked  │   unmasked   │ masked  │
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.indices import Scalar, largest, smallest
from opmux.core.ops.attention_mask import AttentionParams, hides
from opmux.core.request import Request
from opmux.plugins.mosaic_gpu.attention_config import channels


@dataclass(frozen=True)
class Bounds:
    """Lengths of one batch element, and the key that its query 0 stands on."""

    q: Scalar
    kv: Scalar
    center: Scalar


@dataclass(frozen=True)
class Span:
    """Blocks that a tile meets, by their numbers; those in the middle, from `low` to `high`, need no mask.

    The order of blocks is no matter, so the unmasked ones come first, and those on both sides share one loop.
    """

    first: Scalar
    low: Scalar
    high: Scalar
    last: Scalar

    @property
    def inner(self) -> Scalar:
        """How many blocks need no mask."""
        return self.high - self.low

    @property
    def steps(self) -> Scalar:
        """How many blocks there are."""
        return self.last - self.first

    @property
    def masked(self) -> Span:
        """The same blocks, all of which need a mask."""
        return Span(self.first, self.first, self.first, self.last)

    def block(self, step: Scalar) -> Scalar:
        """The number of the block of a step."""
        if self.low is self.first:
            return self.first + step
        outer, before = step - self.inner, self.low - self.first
        outer = jnp.where(outer < before, self.first + outer, self.high - before + outer)
        return jnp.where(step < self.inner, self.low + step, outer)


@dataclass(frozen=True)
class Problem:
    """One attention problem as the kernels see it.

    Attributes:
      params: the op's.
      dtype: of queries, keys and values.
      H: channels of queries and keys, padded; Hv those of values.
      lengths: whether lengths are given, so that bounds are read from memory.
      bias: shape of the bias, if there is one; mask likewise.
      segments: whether there are segment ids.
      hides: whether some queries may see a key that others do not.
    """

    params: AttentionParams
    dtype: np.dtype[Any]
    B: int
    T: int
    S: int
    N: int
    K: int
    H: int
    Hv: int
    lengths: bool
    bias: tuple[int, ...] | None
    mask: tuple[int, ...] | None
    segments: bool
    hides: bool

    @classmethod
    def of(cls, request: Request) -> Problem:
        """The problem of a request, forward or backward."""
        B, T, N, H = request["query"].shape
        S, K, Hv = request["value"].shape[1:]
        bias, mask = (request[name].shape if name in request else None for name in ("bias", "mask"))
        return cls(
            request.params, request["query"].dtype, B, T, S, N, K, channels(H), channels(Hv),
            "q_lengths" in request or "kv_lengths" in request, bias, mask, "q_segments" in request,
            hides(request),
        )  # fmt: skip

    @property
    def G(self) -> int:
        """Query heads of a key/value head."""
        return self.N // self.K

    @property
    def selective(self) -> bool:
        """Whether contents of arrays decide who sees whom, so that every block needs a mask."""
        return self.segments or (self.bias or self.mask) is not None

    def keys_of(self, row: Scalar, size: int, bounds: Bounds, block: int) -> Span:
        """Blocks of keys that the queries of a tile from `row` on see."""
        span = _span(row, size, bounds.q, bounds.kv, bounds.center, self.params.left, self.params.right, block)
        return span.masked if self.selective else span

    def queries_of(self, row: Scalar, size: int, bounds: Bounds, block: int) -> Span:
        """Blocks of queries that see the keys of a tile from `row` on."""
        span = _span(row, size, bounds.kv, bounds.q, -bounds.center, self.params.right, self.params.left, block)
        return span.masked if self.selective else span


def _span(
    row: Scalar, size: int, length: Scalar, others: Scalar, center: Scalar, before: int | None, after: int | None,
    block: int,
) -> Span:  # fmt: skip
    """Blocks, `block` wide, of `others` that rows from `row` on meet: row r those from r + center - before on."""
    end = smallest(row + size, length)
    some, every = [0, others], [0, others]
    if before is not None:
        some[0] = largest(0, row + center - before)
        every[0] = largest(0, end - 1 + center - before)
    if after is not None:
        some[1] = smallest(others, end + center + after)
        every[1] = smallest(others, row + 1 + center + after)
    first = 0 if before is None else lax.div(some[0], block)
    last = largest(_quotient(largest(some[1], 0) + (block - 1), block), first)
    if not isinstance(length, int):
        last = jnp.where(row < length, last, first)
    low = first if before is None else smallest(largest(lax.div(every[0] + (block - 1), block), first), last)
    high = smallest(largest(_quotient(largest(every[1], 0), block), low), last)
    return Span(first, low, high, last)


def _quotient(a: Scalar, b: int) -> Scalar:
    return a // b if isinstance(a, int) else lax.div(a, b)


def fold(span: Span, step: Callable[[bool, Scalar, Any], Any], carry: Any) -> Any:
    """Folds `step(masked, number, carry)` over the steps of a span."""
    for masked, start, stop in ((False, 0, span.inner), (True, span.inner, span.steps)):
        # A number that is known, other than 0, would be a constant of a branch, which Pallas cannot lower.
        if isinstance(stop, int) and isinstance(start, int) and (stop == start or stop == 1):
            carry = step(masked, start, carry) if start < stop else carry
        else:
            carry = lax.fori_loop(start, stop, lambda i, c, masked=masked: step(masked, i, c), carry)
    return carry


def rows_of(vector: jax.Array, shape: tuple[int, int], axis: int = 0) -> jax.Array:
    """A vector along an axis of a matrix, broadcast to it."""
    return lax.broadcast_in_dim(vector, shape, (axis,))

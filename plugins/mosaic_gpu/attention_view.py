"""Which queries see which keys, as the attention kernels of a GPU find out, and what is added to their scores.

Bias and mask come from memory straight to registers: each of their elements is read once for a block of scores. They
are padded to whole blocks, and axes along which they do not vary are left out, so that a mask of padding is a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.indices import Scalar
from opmux.core.ops.attention_mask import lengths
from opmux.core.request import Operands, Request
from opmux.plugins.mosaic_gpu.attention_blocks import Bounds, Problem, rows_of
from opmux.plugins.mosaic_gpu.pallas import load_tile, pad_axis


@dataclass(frozen=True)
class View:
    """What the queries of one head of a batch element see.

    Attributes:
      problem: sizes.
      refs: refs of the arrays that `masks` made.
      b: batch element.
      head: query head.
      query_axis: axis of queries in a block of scores.
    """

    problem: Problem
    refs: Mapping[str, Any]
    b: Scalar
    head: Scalar
    query_axis: int = 0

    @property
    def bounds(self) -> Bounds:
        """Lengths of the batch element, and its diagonal."""
        problem = self.problem
        if "lengths" not in self.refs:
            return Bounds(problem.T, problem.S, problem.S - problem.T if problem.params.bottom_right else 0)
        return Bounds(*(self.refs["lengths"][which, self.b] for which in range(3)))

    def bias(self, row: Scalar, column: Scalar, shape: tuple[int, int]) -> jax.Array | None:
        """The bias of a block of scores, float32; None if there is none."""
        if self.problem.bias is None:
            return None
        return self._load("bias", self.problem.bias, row, column, shape)

    def seen(self, row: Scalar, column: Scalar, shape: tuple[int, int], bias: jax.Array | None = None) -> jax.Array:
        """Which queries from `row` on see which keys from `column` on.

        Args:
          row: first query.
          column: first key.
          shape: of the block of scores.
          bias: what `bias` gave for it.
        """
        problem, params, bounds = self.problem, self.problem.params, self.bounds
        q_axis, kv_axis = self.query_axis, 1 - self.query_axis

        def keys(offset: Scalar) -> jax.Array:
            return rows_of(lax.iota(jnp.int32, shape[kv_axis]) + offset, shape, kv_axis)

        def queries(offset: Scalar) -> jax.Array:
            return rows_of(lax.iota(jnp.int32, shape[q_axis]) + offset, shape, q_axis)

        conditions = []
        # Under a diagonal the last key that a query sees may be one that exists for sure.
        reach = None if params.right is None or problem.lengths else problem.T - 1 + bounds.center + params.right
        if reach is None or reach >= problem.S:
            conditions.append(keys(column) < bounds.kv)
        center = row + bounds.center
        if params.right is not None:
            conditions.append(keys(column) <= queries(center + params.right))
        if params.left is not None:
            conditions.append(keys(column) >= queries(center - params.left))
        if problem.segments:
            (q_s, q_at), (kv_s, kv_at) = (
                (load_tile(self.refs[name], (self.b, pl.ds(start, shape[axis]))), axis)
                for name, start, axis in (("q_segments", row, q_axis), ("kv_segments", column, kv_axis))
            )
            conditions.append(rows_of(q_s, shape, q_at) == rows_of(kv_s, shape, kv_at))
        if problem.mask is not None:
            conditions.append(self._load("mask", problem.mask, row, column, shape) != 0)
        if bias is not None:
            conditions.append(bias != -jnp.inf)
        seen = conditions[0]
        for condition in conditions[1:]:
            seen = seen & condition
        return seen

    def _load(
        self, name: str, whole: tuple[int, ...], row: Scalar, column: Scalar, shape: tuple[int, int]
    ) -> jax.Array:
        B, N, T, S = whole
        at: list[Any] = [self.b if B > 1 else 0, self.head if N > 1 else 0]
        windows = [(row, self.query_axis)] if T > 1 or S == 1 else []
        windows += [(column, 1 - self.query_axis)] if S > 1 else []
        windows.sort(key=lambda window: window[1])
        window = (*at, *(pl.ds(start, shape[axis]) for start, axis in windows))
        if len(windows) == 2:
            return load_tile(self.refs[name], window).astype(jnp.float32)
        return rows_of(load_tile(self.refs[name], window), shape, windows[0][1])


def masks(
    problem: Problem, request: Request, operands: Operands, *, queries: int, keys: int, query_axis: int = 0
) -> dict[str, jax.Array]:
    """The arrays that decide who sees whom, as a `View` reads them.

    Args:
      problem: sizes.
      request: the request, forward or backward.
      operands: its operands.
      queries: rows that the array is padded to a multiple of.
      keys: likewise for keys.
      query_axis: axis of queries in a block of scores.
    """
    arrays: dict[str, jax.Array] = {}
    if problem.lengths:
        arrays["lengths"] = jnp.stack(lengths(request, operands))
    if problem.segments:
        for name, size in (("q_segments", queries), ("kv_segments", keys)):
            arrays[name] = pad_axis(operands[name], 1, size)
    for name in ("bias", "mask"):
        if name in operands:
            array = operands[name]
            narrow = jnp.dtype(jnp.bfloat16) if name == "mask" else array.dtype
            whole = array.shape[2] > 1 and array.shape[3] > 1
            array = array.astype(narrow if whole and narrow.itemsize < 4 else jnp.float32)
            arrays[name] = _scores(array, problem, queries, keys, query_axis)
    return arrays


def _scores(array: jax.Array, problem: Problem, queries: int, keys: int, query_axis: int) -> jax.Array:
    """[#B, #N, #T, #S] padded, without the axes along which it does not vary, but with one of them."""
    b, n, t, s = array.shape
    if t == s == 1:
        array, t = jnp.broadcast_to(array, (b, n, problem.T, 1)), problem.T
    array = pad_axis(array, 2, queries) if t > 1 or s == 1 else array
    array = pad_axis(array, 3, keys) if s > 1 else array
    if t > 1 and s > 1:
        return array.swapaxes(2, 3) if query_axis else array
    return array[:, :, 0] if s > 1 else array[..., 0]

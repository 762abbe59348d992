"""Packed sequences: their offsets, and the rows of at most `size` tokens that they are cut into.

Rows never cross a sequence boundary and restart at every sequence start, so a packed batch is a list of
rows, sequence after sequence:

    cu_seqlens = [0, 5, 5, 37], size = 16

    tokens    0....4|5..............20|21.............36
    row            0|                1|                2       sequence 1 is empty: it has no row
    sequence       0|                2|                2
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core.check import Checker


@partial(jax.tree_util.register_dataclass, data_fields=("values",), meta_fields=("num_splits", "longest", "total"))
@dataclass(frozen=True, slots=True)
class Offsets:
    """`cu_seqlens` together with the sizes that only its concrete values show.

    A pytree with one leaf: it passes through `jit` with the offsets traced and the sizes static, so output
    shapes are exact, and offsets of equal sizes share a compiled function.

    Attributes:
      values: the offsets, [N + 1], int32.
      num_splits: number of rows of `split_size` tokens.
      longest: no sequence is longer, or it is `split_size`; a power of two below that.
      total: the last offset.
    """

    values: Any
    num_splits: int
    longest: int
    total: int

    @classmethod
    def of(cls, check: Checker, cu_seqlens: Any, split_size: int) -> Offsets:
        """Reads and validates concrete offsets.

        Raises:
          ArgumentError: they are not an array [N + 1] of integers, do not start at 0, or decrease.
        """
        given = np.asarray(cu_seqlens)
        if given.size and not np.issubdtype(given.dtype, np.integer):
            raise check.error("cu_seqlens", f"dtype {given.dtype}", "an integer dtype", type_=True)
        if given.ndim != 1 or given.size == 0:
            raise check.error("cu_seqlens", f"shape {given.shape}", "[N + 1] offsets, the first of them 0")
        values = given.astype(np.int64)
        lengths = np.diff(values)
        if values[0] != 0 or (lengths < 0).any():
            raise check.error(
                "cu_seqlens", f"values {_short(values)}", "offsets that start at 0 and never decrease",
                "They are the running sum of the sequence lengths, with a leading 0; an empty sequence repeats one.",
            )  # fmt: skip
        longest = int(lengths.max(initial=0))
        return cls(
            values=values.astype(np.int32),
            num_splits=int((-(-lengths // split_size)).sum()),
            longest=min(split_size, 1 << max(longest - 1, 0).bit_length()),
            total=int(values[-1]),
        )


def max_rows(tokens: int, sequences: int, size: int) -> int:
    """Rows enough for any way of cutting `tokens` into `sequences`."""
    return min(tokens, (tokens + sequences * (size - 1)) // size) if sequences else 0


class RowTable(NamedTuple):
    """Where each row lies; a row past the last one has length 0 and the last sequence.

    Attributes:
      sequence: sequence of each row, [R].
      start: first token of each row, [R].
      length: number of tokens of each row, [R].
      first_row: first row of each sequence, and the number of rows, [N + 1].
    """

    sequence: jax.Array
    start: jax.Array
    length: jax.Array
    first_row: jax.Array


def row_table(cu_seqlens: jax.Array, size: int, num_rows: int) -> RowTable:
    """The rows of packed sequences, in `num_rows` static places.

    Args:
      cu_seqlens: offsets of the sequences, [N + 1], int32, N >= 1.
      size: tokens of a full row.
      num_rows: at least the number of rows there are.
    """
    lengths = jnp.diff(cu_seqlens)
    counts = (lengths + (size - 1)) // size
    first_row = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    row = jnp.arange(num_rows, dtype=jnp.int32)
    # Empty sequences repeat an offset; the right side skips them.
    sequence = jnp.searchsorted(first_row, row, side="right").astype(jnp.int32) - 1
    sequence = jnp.minimum(sequence, lengths.shape[0] - 1)
    done = (row - first_row[sequence]) * size
    length = jnp.where(row < first_row[-1], jnp.clip(lengths[sequence] - done, 0, size), 0)
    return RowTable(sequence, cu_seqlens[sequence] + done, length, first_row)


def gather_rows(array: jax.Array, table: RowTable, span: int) -> jax.Array:
    """Packed tokens [1, T, ...] as rows [1, R, span, ...], 0 past the end of a row."""
    place = jnp.arange(span, dtype=jnp.int32)
    inside = place < table.length[:, None]
    token = jnp.where(inside, table.start[:, None] + place, array.shape[1])
    return array.at[:, token].get(mode="fill", fill_value=0)


def scatter_rows(rows: jax.Array, cu_seqlens: jax.Array, table: RowTable, tokens: int) -> jax.Array:
    """Rows [1, R, span, ...] back as packed tokens [1, T, ...], 0 for tokens past the last sequence.

    A gather all the same: each token knows its place, since only the last row of a sequence may be short.
    """
    span = rows.shape[2]
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.searchsorted(cu_seqlens, token, side="right").astype(jnp.int32) - 1
    place = table.first_row[sequence] * span + token - cu_seqlens[sequence]
    place = jnp.where(token < cu_seqlens[-1], place, rows.shape[1] * span)
    flat = rows.reshape(1, -1, *rows.shape[3:])
    return flat.at[:, place].get(mode="fill", fill_value=0)


def _short(values: np.ndarray) -> str:
    text = values.tolist()
    return str(text) if len(text) <= 12 else f"[{', '.join(map(str, text[:6]))}, ..., {text[-1]}] ({len(text)} offsets)"

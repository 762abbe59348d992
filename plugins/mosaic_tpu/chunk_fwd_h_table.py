"""The index table of packed sequences: what a kernel has to know of each chunk, in few words of scalar memory.

    cu_seqlens = [0, 5, 5, 37], 16 tokens a chunk

    row       0     1      2      3         one row a chunk; a sequence without tokens has a row of its own
    sequence  0     1      2      2
    length    5     0     16     16

A row is some 32-bit words that lie one after another in a flat array: a table `[rows, words]` would be padded to 128
words a row. Several numbers share a word, each as wide as its largest value needs, which the sizes of the arrays
decide before anything runs: nothing wraps however many sequences or tokens there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from opmux.core.ops.chunk_index import RowTable
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import Sizes

WORD_BITS = 32


@dataclass(frozen=True)
class Place:
    """Where a field lies: `bits` bits from bit `shift` of word `word` on."""

    word: int
    shift: int
    bits: int


@dataclass(frozen=True)
class Layout:
    """Fields of non-negative numbers in 32-bit words.

    Attributes:
      places: where each field lies, by name.
      words: words of a row.
    """

    places: Mapping[str, Place]
    words: int

    @classmethod
    def of(cls, largest: Mapping[str, int]) -> Layout:
        """Fields by name with the largest number of each, below 2**31; the widest are placed first."""
        used: list[int] = []
        places: dict[str, Place] = {}
        for name, most in sorted(largest.items(), key=lambda item: -item[1]):
            bits = max(1, most.bit_length())
            if bits >= WORD_BITS:
                raise ValueError(f"field {name!r}: {most} does not fit in 31 bits")
            word = next((word for word, taken in enumerate(used) if taken + bits <= WORD_BITS), len(used))
            if word == len(used):
                used.append(0)
            places[name] = Place(word, used[word], bits)
            used[word] += bits
        return cls(places, len(used))

    def pack(self, fields: Mapping[str, jax.Array]) -> jax.Array:
        """Fields `[rows]` as a flat table, int32 `[rows * words]`."""
        words: list[Any] = [0] * self.words
        for name, place in self.places.items():
            words[place.word] |= fields[name].astype(jnp.uint32) << jnp.uint32(place.shift)
        return lax.bitcast_convert_type(jnp.stack(words, axis=1).reshape(-1), jnp.int32)

    def row(self, table: Any, row: Any) -> tuple[jax.Array, ...]:
        """The words of a row of a table in scalar memory."""
        first = row * jnp.int32(self.words)
        return tuple(table[first + jnp.int32(word)] for word in range(self.words))

    def field(self, name: str, words: tuple[jax.Array, ...]) -> jax.Array:
        """A number from the words of a row."""
        place = self.places[name]
        found = words[place.word]
        if place.shift:
            found = lax.shift_right_logical(found, jnp.int32(place.shift))
        if place.shift + place.bits < WORD_BITS:
            found = found & jnp.int32((1 << place.bits) - 1)
        return found


def layout(sizes: Sizes) -> Layout:
    """The fields of a row.

    `start`: first token that is copied, so that `bt` tokens from there on exist; `shift`: tokens between that and the
    first one of the chunk; `length`: tokens of the chunk; `sequence`; and flags: the chunk `opens` or `closes` its
    sequence, is of a sequence and not only to fill `h` up (`real`), or begins a split whose state is stored
    (`stores`).
    """
    return Layout.of(
        {
            "start": sizes.T - sizes.bt, "shift": sizes.bt, "length": sizes.bt, "sequence": max(sizes.N - 1, 0),
            "opens": 1, "closes": 1, "real": 1, "stores": 1,
        }
    )  # fmt: skip


@dataclass(frozen=True)
class IndexTable:
    """The rows of packed sequences.

    Attributes:
      counts: int32 [5]: rows to be run; those of sequences, which come first; states that these store; chunks that
        have tokens; tokens before the end of the last sequence.
      table: packed rows, int32 `[max_rows * words]`.
      rows: where each chunk lies; chunks of no tokens included.
      shift: tokens between what is copied and the chunk, [max_rows].
    """

    counts: jax.Array
    table: jax.Array
    rows: RowTable
    shift: jax.Array


def index_table(cu_seqlens: jax.Array, sizes: Sizes, fields: Layout) -> IndexTable:
    """The rows of packed sequences, whatever the offsets are: no index in them is out of range.

    Args:
      cu_seqlens: offsets of the sequences, [N + 1], int32, N >= 1.
      sizes: sizes of the request; at least one token.
      fields: layout of a row.
    """
    bt = jnp.int32(sizes.bt)
    lengths = jnp.clip(jnp.diff(cu_seqlens), 0, sizes.T)
    counts = jnp.maximum((lengths + bt - 1) // bt, 1)
    first_row = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    row = jnp.arange(sizes.max_rows, dtype=jnp.int32)
    real = row < first_row[-1]
    sequence = jnp.searchsorted(first_row, row, side="right").astype(jnp.int32) - 1
    sequence = jnp.clip(sequence, 0, sizes.N - 1)
    chunk = row - first_row[sequence]
    length = jnp.where(real, jnp.clip(lengths[sequence] - chunk * bt, 0, bt), 0)
    begin = jnp.where(length > 0, cu_seqlens[sequence] + chunk * bt, 0)
    start = jnp.clip(begin, 0, sizes.T - sizes.bt)
    shift = jnp.clip(begin - start, 0, bt)
    length = jnp.minimum(length, bt - shift)

    stores = jnp.where(real, (length > 0) & (chunk % jnp.int32(sizes.per_split) == 0), True)
    stores &= jnp.cumsum(stores, dtype=jnp.int32) <= sizes.num_splits
    # Rows of no sequence fill up `h`, where its size is a bound; the rest is not run.
    run = jnp.max(jnp.where(real | stores, row + 1, 0))
    end = jnp.clip(cu_seqlens[-1], 0, sizes.T)
    sums = [jnp.sum(flags, dtype=jnp.int32) for flags in (real, real & stores, length > 0)]
    table = fields.pack(
        {
            "start": start, "shift": shift, "length": length, "sequence": sequence, "stores": stores, "real": real,
            "opens": jnp.where(real, chunk == 0, True),
            "closes": real & (chunk == counts[sequence] - 1),
        }
    )  # fmt: skip
    rows = RowTable(sequence, begin, length, first_row)
    return IndexTable(jnp.stack([run, *sums, end]), table, rows, shift)

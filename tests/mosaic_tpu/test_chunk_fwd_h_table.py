"""The index table of packed sequences: what it says of any offsets, and that no index in it is out of range."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core.ops.chunk_fwd_h import OP
from opmux.core.ops.chunk_index import max_rows
from opmux.plugins.mosaic_tpu.chunk_fwd_h import block_spec
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import Sizes
from opmux.plugins.mosaic_tpu.chunk_fwd_h_table import Layout, index_table, layout

FIELDS = ("start", "shift", "length", "sequence", "opens", "closes", "real", "stores")


def packed_sizes(T, N, bt, per_split=1, num_splits=None):
    if num_splits is None:
        num_splits = max_rows(T, N, bt * per_split)
    bt = min(bt, T)
    return Sizes(B=1, T=T, H=2, K=4, V=4, N=N, bt=bt, bh=2, bv=4, per_split=per_split, num_splits=num_splits, raw=True)


@partial(jax.jit, static_argnums=1)
def decoded(cu_seqlens, sizes):
    fields = layout(sizes)
    index = index_table(cu_seqlens, sizes, fields)
    words = tuple(index.table.reshape(-1, fields.words).T)
    return index.counts, {name: fields.field(name, words) for name in FIELDS}


def rows_of(cu_seqlens, sizes):
    counts, columns = decoded(np.asarray(cu_seqlens, np.int32), sizes)
    run, real, stores, chunks, end = (int(count) for count in counts)
    assert run <= sizes.max_rows
    columns = {name: np.asarray(column).tolist() for name, column in columns.items()}
    rows = [{name: columns[name][row] for name in FIELDS} for row in range(run)]
    assert real == sum(row["real"] for row in rows)
    assert stores == sum(row["stores"] & row["real"] for row in rows)
    assert chunks == sum(row["length"] > 0 for row in rows)
    return rows, end


@pytest.mark.parametrize(
    "largest",
    [
        {"a": 70_000, "b": 65_535, "c": 65_536, "d": 1, "e": 1},
        {"a": 2**31 - 1, "b": 2**31 - 1, "c": 1, "d": 0},
        {"a": 2**16, "b": 2**15 - 1, "c": 1},
        {"a": 0},
    ],
)
def test_every_number_comes_back_however_wide(largest):
    fields = Layout.of(largest)
    rng = np.random.default_rng(0)
    values = {name: rng.integers(0, most + 1, 50) for name, most in largest.items()}
    for name, most in largest.items():
        values[name][:2] = (0, most)
    table = fields.pack({name: jnp.asarray(column, jnp.int32) for name, column in values.items()})
    assert table.shape == (50 * fields.words,)
    for row in (0, 1, 2, 49):
        words = fields.row(table, row)
        assert {name: int(fields.field(name, words)) for name in largest} == {n: c[row] for n, c in values.items()}


def test_a_number_that_needs_32_bits_is_an_error():
    with pytest.raises(ValueError, match="field 'tokens': 2147483648 does not fit in 31 bits"):
        Layout.of({"tokens": 2**31})


def test_few_words_where_sizes_are_small_and_more_where_they_are_not():
    assert layout(packed_sizes(2048, 4, 64)).words == 1
    assert layout(packed_sizes(200_000, 70_000, 64)).words == 2


def test_more_sequences_than_16_bits_count():
    sizes = packed_sizes(70_000, 70_000, 64)
    rows, end = rows_of(np.arange(70_001), sizes)
    assert (len(rows), end) == (70_000, 70_000)
    assert [row["sequence"] for row in rows] == list(range(70_000))
    assert all(row["start"] + row["shift"] == n and row["length"] == 1 for n, row in enumerate(rows))


def test_the_table_of_the_example():
    rows, _ = rows_of([0, 5, 5, 37], packed_sizes(37, 3, 16))
    found = [(row["sequence"], row["start"] + row["shift"], row["length"]) for row in rows if row["real"]]
    assert found == [(0, 0, 5), (1, 0, 0), (2, 5, 16), (2, 21, 16)]
    assert [row["opens"] for row in rows[:4]] == [1, 1, 1, 0]
    assert [row["closes"] for row in rows[:4]] == [1, 1, 0, 1]
    assert [row["stores"] for row in rows[:4]] == [1, 0, 1, 1]


@pytest.mark.parametrize(("T", "bt", "per_split"), [(61, 16, 1), (61, 7, 3), (9, 16, 1), (23, 1, 1)])
def test_rows_cover_every_token_of_every_sequence_once(T, bt, per_split):
    rng, N = np.random.default_rng(bt), 5
    sizes = packed_sizes(T, N, bt, per_split)
    for _ in range(20):
        offsets = np.asarray([0, *np.sort(rng.integers(0, T + 1, N - 1)), T])
        rows, end = rows_of(offsets, sizes)
        real = [row for row in rows if row["real"]]
        tokens = [(row["sequence"], row["start"] + row["shift"] + i) for row in real for i in range(row["length"])]
        assert tokens == [(n, t) for n in range(N) for t in range(offsets[n], offsets[n + 1])]
        assert end == T
        assert sum(row["stores"] for row in rows) == sizes.num_splits
        assert sum(row["stores"] for row in real) == (-(-np.diff(offsets) // (sizes.bt * per_split))).sum()
        for flag in ("opens", "closes"):
            assert [row["sequence"] for row in real if row[flag]] == list(range(N))


@pytest.mark.parametrize(("T", "N", "bt", "per_split"), [(50, 4, 8, 1), (50, 4, 8, 2), (5, 3, 5, 1)])
def test_no_index_is_out_of_range_whatever_traced_offsets_hold(T, N, bt, per_split):
    """This is what lets the kernels go without the compiler's own checks of bounds."""
    rng = np.random.default_rng(3)
    worst = np.iinfo(np.int32)
    sizes = packed_sizes(T, N, bt, per_split)
    for turn in range(60):
        low, high = [(-20, 80), (0, T), (worst.min, worst.max)][turn % 3]
        rows, end = rows_of(rng.integers(low, high, N + 1), sizes)
        assert 0 <= end <= T
        assert rows
        for row in rows:
            assert row["start"] <= T - sizes.bt
            assert row["shift"] + row["length"] <= sizes.bt
            assert row["sequence"] < N
        assert sum(row["stores"] for row in rows) <= sizes.num_splits
        assert len(rows) <= sizes.max_rows


@pytest.mark.parametrize(("T", "chunk", "split", "H", "V"), [(37, 8, 8, 3, 5), (83, 8, 24, 12, 131), (5, 64, 64, 2, 3)])
def test_blocks_of_fixed_length_begin_within_their_arrays(T, chunk, split, H, V):
    k, v = (jax.ShapeDtypeStruct((2, T, H, size), jnp.float32) for size in (6, V))
    request = OP.request((k, v), {"chunk_size": chunk, "split_size": split, "gates": "raw"})
    sizes = Sizes.of(request, 64, 8, 128)
    shapes = {"k": k.shape, "v": v.shape, "scalars": (2, sizes.chunks, H, sizes.bt + 1), "h0": (2, H, 6, V),
              "h": (2, sizes.num_splits, H, 6, V), "states": (2, sizes.chunks, H, 6, V)}  # fmt: skip
    grid = (2, sizes.head_blocks, sizes.value_blocks, sizes.chunks)
    for backwards, (name, shape) in itertools.product((False, True), shapes.items()):
        spec = block_spec(name, sizes, backwards=backwards)
        block = [size or 1 for size in spec.block_shape]
        seen = set()
        for step in itertools.product(*map(range, grid)):
            at = [int(i) for i in spec.index_map(*map(jnp.int32, step))]
            assert all(0 <= i * some < size for i, some, size in zip(at, block, shape, strict=True))
            seen.add(tuple(at))
        assert len(seen) == np.prod([-(-size // some) for size, some in zip(shape, block, strict=True)])

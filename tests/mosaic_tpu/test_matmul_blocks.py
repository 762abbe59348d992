"""Where the kernel of products reads and writes: proof that its copies need no bounds checks, and its layouts."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from opmux.core.cases import matmul as matmul_cases
from opmux.plugins.mosaic_tpu.matmul_blocks import plan
from opmux.plugins.mosaic_tpu.matmul_layout import layout

SIZES = (1, 7, 16, 100, 128, 129, 300)
BATCHES = (((), ()), ((3,), (3,)), ((3,), (1,)), ((1,), (3,)), ((2, 1, 3), (2, 2, 1)))


def case_shapes():
    for case in matmul_cases.cases():
        (a, b), _ = case.arguments()
        a, b = np.atleast_2d(a), b if b.ndim > 1 else b[:, None]
        rank = max(a.ndim, b.ndim)
        if a.size and b.size:
            yield (1,) * (rank - a.ndim) + a.shape, (1,) * (rank - b.ndim) + b.shape


def plans(a, b, most):
    """The plans of a product and of both of its cotangents."""
    where = layout(a, b)
    left, right, out = where.left, where.right, where.out
    yield plan(left, right, out[:-2], most, right_transposed=where.turned)
    yield plan(out, right, left[:-2], most, right_transposed=not where.turned)
    factors = (out, left) if where.turned else (left, out)
    yield plan(*factors, right[:-2], most, left_transposed=True)


def shapes():
    yield from case_shapes()
    for (left, right), (M, K, N) in itertools.product(BATCHES, itertools.product(SIZES, repeat=3)):
        yield (*left, M, K), (*right, K, N)


def test_every_block_begins_inside_of_its_array():
    """What lies past the end of a block that begins inside is cut off by the pipeline, without a check."""
    for a, b in shapes():
        for where in plans(a, b, (16, 128, 128)):
            for each in (where.left, where.right, where.out):
                lengths = [size or 1 for size in each.block]
                assert all(length <= size for length, size in zip(lengths, each.shape, strict=True))
                last = each.index(*(size - 1 for size in where.grid))
                first = each.index(*(0 for _ in where.grid))
                # An index is 0 or one coordinate of the grid, so its extremes are at the corners.
                assert first == (0,) * len(each.shape)
                assert all(at * n < size for at, n, size in zip(last, lengths, each.shape, strict=True))


def test_an_index_is_zero_or_one_coordinate():
    for a, b in case_shapes():
        for where in plans(a, b, (16, 128, 128)):
            names = [f"g{axis}" for axis in range(len(where.grid))]
            for each in (where.left, where.right, where.out):
                assert all(at == 0 or at in names for at in each.index(*names))


@pytest.mark.parametrize(("a", "b"), [((2, 1, 3, 18, 300), (2, 2, 1, 300, 130)), ((300, 40), (40, 1))])
def test_every_product_of_blocks_is_made_once(a, b):
    for where in plans(a, b, (16, 128, 128)):
        points = list(itertools.product(*map(range, where.grid)))
        written = [where.out.index(*point) for point in points]
        # Of one block of the result all points follow each other.
        assert len(list(itertools.groupby(written))) == len(set(written)) == math.prod(where.grid[: where.parallel])
        read = Counter((where.left.index(*point), where.right.index(*point)) for point in points)
        assert set(read.values()) == {1}


def test_blocks_follow_the_rules_of_tiles():
    for a, b in shapes():
        for where in plans(a, b, (16, 128, 128)):
            for each in (where.left, where.right, where.out):
                for length, size, multiple in zip(each.block[-2:], each.shape[-2:], (8, 128), strict=True):
                    assert length == size or length % multiple == 0


def test_layout_merges_what_is_free_to_merge():
    assert layout((2, 3, 5, 9), (1, 1, 9, 7)).left == (30, 9)
    assert layout((2, 3, 5, 9), (2, 3, 9, 7)).left == (6, 5, 9)
    assert layout((3, 2048, 9), (1, 9, 7)).left == (3 * 2048, 9)
    assert layout((3, 2049, 9), (1, 9, 7)).left == (3, 2049, 9)  # rows of two elements would share a tile
    assert layout((1, 1, 5, 9), (1, 4, 9, 7)).right == (4, 9, 7)
    turned = layout((1, 150, 9), (4, 9, 1))
    assert (turned.turned, turned.left, turned.right, turned.out) == (True, (4, 9), (150, 9), (4, 150))

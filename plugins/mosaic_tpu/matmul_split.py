"""Writes the pieces of a block of a factor to vector memory; see `matmul_pieces`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from opmux.plugins.mosaic_tpu.dense_config import LANES, SUBLANES, round_up

_REGISTERS = 8
"""Registers that are split in one turn of a loop: enough to hide latencies, and few enough to stay registers."""

_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def split(ref: Any, pieces_ref: Any, transposed: bool) -> list[Any]:
    """Writes the pieces of a block, [number, rows, columns], and gives each as a reference.

    Args:
      ref: the block, [rows, columns].
      pieces_ref: where its pieces go.
      transposed: the block is [columns, rows].
    """
    number = pieces_ref.shape[0]
    rows, columns = ref.shape
    # Columns of the block become rows of its pieces, a square at a time.
    width = LANES if transposed else columns
    packed = max(2, 4 // ref.dtype.itemsize) * SUBLANES  # rows of a register, of the pieces or of the block
    some = (
        LANES if transposed else max(packed, _REGISTERS * LANES * SUBLANES // round_up(width, LANES) // packed * packed)
    )

    def split_rows(start: Any, length: int) -> None:
        for column in range(0, columns, width):
            at, across = pl.ds(start, length), pl.ds(column, min(width, columns - column))
            block = ref[at, across].astype(np.float32)
            to = (across, at) if transposed else (at, across)
            for piece, array in enumerate(_pieces(block.T if transposed else block, number)):
                pieces_ref[piece, *to] = array

    turns, left_over = divmod(rows, some)
    if turns:
        lax.fori_loop(0, turns, lambda turn, _: split_rows(pl.multiple_of(turn * some, some), some), None)
    if left_over:
        split_rows(turns * some, left_over)
    return [pieces_ref.at[piece] for piece in range(number)]


def _pieces(x: jax.Array, number: int) -> list[jax.Array]:
    found = [x.astype(jnp.bfloat16)]
    rest = jnp.where(jnp.abs(x) <= _LARGEST, x, 0.0)
    for _ in range(number - 1):
        found.append(rest.astype(jnp.bfloat16))
        rest = rest - found[-1].astype(np.float32)
    return found

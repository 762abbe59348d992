"""Heads one after another: turning blocks of tokens into blocks of heads and back, and loops over heads.

Tokens come and go as `[bt, bh, D]`, since that is how they lie in HBM; heads are the rows of a tile there. A head
computes on `[bt, D]`, so a block is turned once, as a whole, into `[bh, bt, D]` in scratch: 8 tokens of a head take
one load then and not eight. What a head needs is read from scratch where it is used, which keeps registers free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import LANES, SUBLANES, Sizes

_SLAB = 2 * SUBLANES
"""Tokens of a tile of 16-bit numbers."""


def rows_scratch(arrays: Mapping[str, Any], sizes: Sizes, prefix: str = "") -> dict[str, Any]:
    """Scratch `<name>_rows` `[bh, bt, D]` for the arrays of keys, values, their gates or their cotangents."""
    channels = {"k": sizes.K, "v": sizes.bv, "gk": sizes.K, "gv": sizes.bv}
    return {
        f"{prefix}{name}_rows": pltpu.VMEM((sizes.bh, sizes.bt, channels[name]), arrays[prefix + name].dtype)
        for name in channels
        if prefix + name in arrays
    }


def to_heads(tokens: Any, heads: Any) -> None:
    """Tokens `[bt, bh, D]` or `[1, bt, bh, D]` in memory, by head `[bh, bt, D]`.

    Mosaic loads a block turned where that is all of an allocation, as `[1, bt, bh, 128]` is. A slot of a buffer, or
    more channels, are turned in registers, some tokens at a time, so that there are enough of them.
    """
    if not _turns(heads.shape):
        tokens = tokens.at[0] if len(tokens.shape) == 4 else tokens

        def turn(some: Any) -> None:
            for head in range(heads.shape[0]):
                heads[head, some, :] = tokens[some, head, :]

        _for_slabs(heads.shape[1], turn)
    elif len(tokens.shape) == 4 and heads.shape[2] == LANES:
        heads[...] = jnp.transpose(tokens[...], (0, 2, 1, 3))[0]
    else:
        tokens = tokens.at[0] if len(tokens.shape) == 4 else tokens
        for some in _slabs(heads.shape[1]):
            heads[:, some, :] = _turned(tokens[some])


def to_tokens(heads: Any, tokens: Any) -> None:
    """The other way, to tokens `[bt, bh, D]`."""
    if _turns(heads.shape):
        for some in _slabs(heads.shape[1]):
            tokens[some] = _turned(heads[:, some, :])
    else:

        def turn(some: Any) -> None:
            for head in range(heads.shape[0]):
                tokens[some, head, :] = heads[head, some, :]

        _for_slabs(heads.shape[1], turn)


def _turned(array: jax.Array) -> jax.Array:
    """The first two axes swapped. Mosaic turns whole registers, so lanes that are missing are filled up first."""
    channels = array.shape[2]
    if channels % LANES == 0:
        return jnp.swapaxes(array, 0, 1)
    fill = jnp.zeros((*array.shape[:2], -channels % LANES), array.dtype)
    return jnp.swapaxes(jnp.concatenate([array, fill], axis=2), 0, 1)[..., :channels]


def _slabs(tokens: int) -> list[slice]:
    return [slice(first, first + _SLAB) for first in range(0, tokens, _SLAB)]


def _for_slabs(tokens: int, run: Callable[[Any], None]) -> None:
    """Runs slabs one after another: the rows of all heads of a block are more than there are registers."""
    slabs = tokens // _SLAB
    if slabs:
        lax.fori_loop(0, slabs, lambda n, _: run(pl.ds(pl.multiple_of(n * _SLAB, _SLAB), _SLAB)), None)
    if tokens % _SLAB:
        run(slice(slabs * _SLAB, tokens))


def _turns(shape: tuple[int, ...]) -> bool:
    """Whether the tiles of `[bh, bt, D]` are full but for lanes, so that Mosaic turns them."""
    heads, tokens, _ = shape
    return heads > 1 and heads & (heads - 1) == 0 and tokens % _SLAB == 0


def for_heads(heads: int, at_once: int, run: Callable[[Any], None]) -> None:
    """Runs each of the heads, so many at once as the compiler may interleave without running out of registers."""
    at_once = min(at_once, heads)

    def some(turn: Any, _: Any) -> None:
        for head in range(at_once):
            run(turn * jnp.int32(at_once) + jnp.int32(head))

    turns = heads // at_once
    if turns > 1:
        lax.fori_loop(0, turns, some, None)
    for head in range(0 if turns == 1 else turns * at_once, heads):
        run(head)


def copy_heads(to: Any, state: Any | None) -> None:
    """Copies states `[bh, K, V]` in memory, rounded if need be; 0 from None."""

    def copy(head: Any) -> None:
        to[head] = jnp.zeros(to.shape[1:], to.dtype) if state is None else state[head].astype(to.dtype)

    for_heads(to.shape[0], 1, copy)

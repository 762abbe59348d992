"""How `chunk_fwd_h` is cut into steps on a TPU, and what a step keeps in vector memory. Imports no Pallas.

A step takes the tokens of one chunk for several heads. Arrays stay as users give them, `[B, T, H, D]`: time is no
tiled axis there, so a step may begin at any token and a chunk may have any length, and nothing is transposed. Heads
are the rows of a tile, so a step takes all of them, or 8 at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from opmux.core.ops.chunk_index import max_rows
from opmux.core.ops.chunk_states import ChunkParams, sequences
from opmux.core.request import Request

LANES = 128
SUBLANES = 8
F32 = np.dtype(np.float32)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a request and of its steps.

    Attributes:
      B, T, H, K, V: axes of the operands.
      N: number of sequences.
      bt: tokens of a step.
      bh: heads of a step.
      bv: value channels of a step.
      per_split: steps between stored states.
      num_splits: stored states.
      raw: gates are per token.
      at_once: heads whose work the compiler may interleave.
    """

    B: int
    T: int
    H: int
    K: int
    V: int
    N: int
    bt: int
    bh: int
    bv: int
    per_split: int
    num_splits: int
    raw: bool
    at_once: int = 1

    @classmethod
    def of(cls, request: Request, block_tokens: int, block_heads: int, block_values: int, at_once: int = 1) -> Sizes:
        """The steps of a request.

        Args:
          request: a request of the op or of its backward.
          block_tokens: most tokens of a step where gates are per token; running sums take a chunk at a time.
          block_heads: most heads of a step, a multiple of 8.
          block_values: most value channels of a step, a multiple of 128.
          at_once: heads whose work the compiler may interleave.
        """
        params: ChunkParams = request.params
        B, T, H, K = request["k"].shape
        V = request["v"].shape[-1]
        sums = not params.raw and any(name in request for name in ("g", "gk", "gv"))
        bt = params.chunk if sums else _tokens(params.span, block_tokens)
        return cls(
            B=B, T=T, H=H, K=K, V=V, N=sequences(request),
            bt=min(bt, max(T, 1)),
            bh=min(block_heads, H),
            bv=min(block_values, V),
            per_split=max(1, params.span // bt),
            num_splits=params.num_splits,
            raw=params.raw,
            at_once=at_once,
        )  # fmt: skip

    @property
    def head_blocks(self) -> int:
        """Steps along the heads."""
        return -(-self.H // self.bh)

    @property
    def value_blocks(self) -> int:
        """Steps along the value channels."""
        return -(-self.V // self.bv)

    @property
    def chunks(self) -> int:
        """Steps along the tokens of a sequence, where all are of one length."""
        return -(-self.T // self.bt)

    @property
    def max_rows(self) -> int:
        """Rows enough for the index table of any packed sequences of these sizes."""
        chunks = min(max_rows(self.T, self.N, self.bt), self.num_splits * self.per_split)
        # A sequence without a token has a row for its final state, and a stored state that no sequence has one too.
        return chunks + self.N + (self.num_splits if self.per_split > 1 else 0)


def _tokens(span: int, most: int) -> int:
    """The largest divisor that is no longer than `most`, unless that is too short to be worth a step."""
    best = next(size for size in range(min(most, span), 0, -1) if span % size == 0)
    return best if best >= min(SUBLANES, span) else next(n for n in range(SUBLANES, span + 1) if span % n == 0)


def padded_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    """Bytes of an array in vector memory, whose last two axes lie in tiles."""
    *leading, rows, lanes = shape
    itemsize = np.dtype(dtype).itemsize
    # Few rows have tiles of few rows, down to one 32-bit word.
    tile = min(SUBLANES * max(1, 4 // itemsize), max(4 // itemsize, 1 << max(rows - 1, 0).bit_length()))
    return math.prod(leading) * -(-rows // tile) * tile * -(-lanes // LANES) * LANES * itemsize


def kernel_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype in which a kernel reads keys and values: Mosaic loads no float16, so that is widened."""
    return F32 if np.dtype(dtype) == np.float16 else np.dtype(dtype)


def vmem_bytes(request: Request, sizes: Sizes, *, backward: bool) -> int:
    """Vector memory that a kernel takes: two blocks of each array, and scratch."""
    dtype = kernel_dtype(request["k"].dtype)
    stored = F32 if request.params.states_in_fp32 else dtype
    bt, bh, K, V = sizes.bt, sizes.bh, sizes.K, sizes.bv
    state, stored_state = padded_bytes((bh, K, V), F32), padded_bytes((bh, K, V), stored)
    gates = [(size, F32) for name, size in (("gk", K), ("gv", V)) if name in request]
    channels = [(K, dtype), (V, dtype), *gates]
    tokens = sum(padded_bytes((bt, bh, size), each) for size, each in channels)
    rows = sum(padded_bytes((bh, bt, size), each) for size, each in channels)
    sums = sum(padded_bytes((bt, bh, size), each) for size, each in gates) if sizes.raw else 0
    tokens += padded_bytes((bh, bt + 1), F32) if "g" in request or "g_gamma" in request else 0
    if backward:
        return 2 * (2 * tokens + 3 * state + stored_state) + state + 2 * rows + sums
    return 2 * (tokens + 2 * state + stored_state) + state + rows + sums

"""What `add`, `matmul` and `reduce` take in interpret mode, and how they are tuned. Imports no Pallas.

An interpreted grid is a loop that copies blocks in and out, so the defaults make one block of anything that
fits comfortably in memory: XLA then drops the loop and the copies.
"""

from __future__ import annotations

import jax.numpy as jnp
from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.request import Request


class AddConfig(Config):
    """Blocks of an addition.

    Attributes:
      block_size: most elements of the output in one block. Blocks span whole trailing axes first.
    """

    block_size: int = Field(default=1 << 26, gt=0)


class MatmulConfig(Config):
    """Blocks of a matrix product. Each is a maximum: blocks along an axis are made equally long.

    Attributes:
      block_m: rows of `a` in one block.
      block_n: columns of `b` in one block.
      block_k: terms of the sum in one block; partial sums are kept in an accumulator between blocks.
      block_batch: batch elements in one block. Blocks span whole trailing batch axes first.
    """

    block_m: int = Field(default=1 << 26, gt=0)
    block_n: int = Field(default=1 << 26, gt=0)
    block_k: int = Field(default=1 << 26, gt=0)
    block_batch: int = Field(default=1 << 26, gt=0)


class ReduceConfig(Config):
    """Blocks of a reduction. Blocks span whole trailing axes first.

    Attributes:
      block_kept: most elements of the result in one block.
      block_reduced: most elements reduced to one in one block; partial results are kept in an accumulator between
        blocks.
    """

    block_kept: int = Field(default=1 << 26, gt=0)
    block_reduced: int = Field(default=1 << 26, gt=0)


def supports(request: Request, device: Device) -> list[Rejection]:
    """Reasons why an interpreted kernel cannot take a request."""
    reasons: list[Rejection] = []
    if request.manual_axes:
        reasons.append(
            Rejection(
                "shard_map",
                "interpreted Pallas kernels cannot run under shard_map's replication checks",
                "jax.shard_map(..., check_vma=False), or backend xla",
            )
        )
    dtypes = [spec.dtype for _, spec in request.operands]
    dtypes += [dtype for name in ("acc", "dtype") if (dtype := getattr(request.params, name, None)) is not None]
    for dtype in dict.fromkeys(dtypes):
        if jnp.issubdtype(dtype, jnp.complexfloating):
            reasons.append(Rejection("dtype", f"Pallas has no {dtype.name}", "backend xla"))
    return reasons


def even_block(size: int, most: int) -> int:
    """Length of blocks of at most `most` elements that cut an axis most evenly."""
    return -(-size // -(-size // most))


def trailing_blocks(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """A block of at most `most` elements that spans whole trailing axes before it splits one."""
    blocks: list[int] = []
    for size in reversed(shape):
        blocks.append(even_block(size, max(most, 1)))
        most //= blocks[-1]
    return tuple(reversed(blocks))

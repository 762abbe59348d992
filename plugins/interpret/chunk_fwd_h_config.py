"""What the interpreted `chunk_fwd_h` kernels take, and their block sizes."""

from __future__ import annotations

import math

from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.request import Request

STEP_BYTES = 256 * 2**20
"""What the operands of one grid step may take. The interpreter copies every block, so fewer steps are faster."""


class ChunkFwdHConfig(Config):
    """Blocks of the forward kernel; each is cut to the size of its axis.

    Attributes:
      block_batch: batch elements of a grid step.
      block_heads: heads of a grid step.
      block_splits: splits of a grid step; steps along them run one after another.
      block_k: key channels of a grid step.
      block_v: value channels of a grid step.
    """

    block_batch: int = Field(gt=0)
    block_heads: int = Field(gt=0)
    block_splits: int = Field(gt=0)
    block_k: int = Field(gt=0)
    block_v: int = Field(gt=0)


class ChunkFwdHVjpConfig(Config):
    """Blocks of the backward kernel, which takes all channels at once.

    Attributes:
      block_batch: batch elements of a grid step.
      block_heads: heads of a grid step.
      block_splits: splits of a grid step; steps along them run one after another, the last one first.
    """

    block_batch: int = Field(gt=0)
    block_heads: int = Field(gt=0)
    block_splits: int = Field(gt=0)


def supports(request: Request, device: Device) -> list[Rejection]:
    """Everything, except under the replication checks of `shard_map`."""
    if not request.manual_axes:
        return []
    return [
        Rejection(
            "shard_map",
            "interpreted Pallas kernels cannot run under shard_map's replication checks",
            "jax.shard_map(..., check_vma=False), or backend xla",
        )
    ]


def default_config(request: Request, device: Device) -> ChunkFwdHConfig:
    """One grid step where it fits."""
    batch, heads, splits = _blocks(request)
    K, V = request["k"].shape[-1], request["v"].shape[-1]
    return ChunkFwdHConfig(
        block_batch=batch, block_heads=heads, block_splits=splits, block_k=max(K, 1), block_v=max(V, 1)
    )


def default_vjp_config(request: Request, device: Device) -> ChunkFwdHVjpConfig:
    """One grid step where it fits."""
    batch, heads, splits = _blocks(request)
    return ChunkFwdHVjpConfig(block_batch=batch, block_heads=heads, block_splits=splits)


def _blocks(request: Request) -> tuple[int, int, int]:
    """Batch elements, heads and splits of a step: heads are halved first, since they take no tail."""
    B, _, H, K = request["k"].shape
    V = request["v"].shape[-1]
    splits = request.params.num_splits
    # In float32: keys, values and a gate of each, and the state that a split adds.
    split_bytes = 4 * (request.params.span * 2 * (K + V) + 2 * K * V)
    sizes = [max(B, 1), max(H, 1), max(splits, 1)]
    for axis in (0, 2, 1):
        while sizes[axis] > 1 and math.prod(sizes) * split_bytes > STEP_BYTES:
            sizes[axis] = -(-sizes[axis] // 2)
    return sizes[0], sizes[1], sizes[2]

"""What the GPU kernels of `attention` take, and how they are tuned. Imports no Pallas."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.request import Request
from opmux.plugins.mosaic_gpu.capability import SMEM_BYTES, size_rejections, wgmma_rejections

DTYPES = (np.dtype(jnp.bfloat16), np.dtype(np.float16))

ROWS = 64
"""Rows of a product of one warpgroup."""

TILE = 2 * ROWS
"""Rows of a tile: of queries, or in the backward of keys, half of them for each compute warpgroup."""

MOST_CHANNELS = 256
"""A head is one operand of a product."""


class AttentionConfig(Config):
    """Blocks of an attention kernel on a GPU; a tile has 128 rows, 64 for each compute warpgroup.

    Attributes:
      block_kv: keys of a block that streams past the queries.
      num_stages: blocks of keys, and of values, that can be on their way.
      num_ctas: most blocks of threads that run, each over many tiles. By default there is one for each tile, and
        the hardware balances tiles of unequal length.
    """

    block_kv: int = Field(default=128, gt=0, le=256, multiple_of=16)
    num_stages: int = Field(default=2, ge=2, le=8)
    num_ctas: int | None = Field(default=None, gt=0)


class AttentionVjpConfig(Config):
    """Blocks of the backward kernels of attention on a GPU; tiles as in the forward.

    Attributes:
      block_kv: keys of a block that streams past the queries, for the cotangents of the queries.
      block_q: queries of a block that streams past the keys, for the cotangents of keys and values.
      num_stages: blocks that can be on their way.
      num_ctas: most blocks of threads that run, each over many tiles; one for each tile by default.
    """

    block_kv: int = Field(default=64, gt=0, le=128, multiple_of=16)
    block_q: int = Field(default=64, gt=0, le=128, multiple_of=16)
    num_stages: int = Field(default=4, ge=2, le=8)
    num_ctas: int | None = Field(default=None, gt=0)


WIDE = 192
"""Channels of a value above which its products are made in two halves, so that sums of one fit in registers."""


def channels(size: int) -> int:
    """Channels of a head in shared memory: the next multiple of 16, of which a product, or of its halves, is made."""
    return max(16, size + -size % (16 if size <= WIDE else 32))


def supports(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernels, forward and backward, cannot take a request."""
    query, value = request["query"], request["value"]
    reasons = wgmma_rejections(device)
    if query.dtype not in DTYPES:
        reasons.append(
            Rejection(
                "dtype",
                f"{query.dtype.name}: weights are an operand of wgmma in registers, which takes 16 bits",
                "cast to bfloat16 or float16, or backend xla",
            )
        )
    reasons += [
        Rejection("shape", f"{size} channels of {name}; a head has at most {MOST_CHANNELS}", "backend xla")
        for name, size in (("query and key", query.shape[-1]), ("value", value.shape[-1]))
        if size > MOST_CHANNELS
    ]
    sizes = [request[name].size for name in request if name not in ("q_lengths", "kv_lengths")]
    return [*reasons, *size_rejections(sizes)]


def default_config(request: Request, device: Device) -> AttentionConfig:
    """Blocks of the forward: as many keys as accumulators, masks and shared memory leave room for."""
    H, Hv = (channels(request[name].shape[-1]) for name in ("query", "value"))
    busy = request.params.left is not None or any(name in request for name in ("bias", "mask", "q_segments"))
    Hv = Hv if Hv <= WIDE else Hv // 2
    block = 64 if H + Hv > 256 or (busy and Hv > 64) else 128
    resident = TILE * (H if Hv == H else H + Hv) * 2
    return AttentionConfig(block_kv=block, num_stages=_stages(resident, block * (H + Hv) * 2, 4))


def default_vjp_config(request: Request, device: Device) -> AttentionVjpConfig:
    """Blocks of the backward: two blocks of scores beside the accumulators."""
    H, Hv = (channels(request[name].shape[-1]) for name in ("query", "value"))
    params = request.params
    lengths = "q_lengths" in request or "kv_lengths" in request
    busy = params.soft_cap is not None or params.left is not None or (params.banded and lengths)
    block_kv = 64 if H + Hv <= 384 else 32
    block_q = 32 if busy and H + Hv > 192 else block_kv
    stages = _stages(TILE * (H + Hv) * 2, block_kv * (H + Hv + 4) * 2, 4)
    return AttentionVjpConfig(block_kv=block_kv, block_q=block_q, num_stages=stages)


def _stages(resident: int, block: int, most: int) -> int:
    """Stages of blocks that fit beside what stays in shared memory."""
    return max(2, min(most, (SMEM_BYTES - 4096 - resident) // block))

"""What the attention kernels take on TPUs, and how they are tuned. Imports no Pallas."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.request import Request
from opmux.plugins.mosaic_tpu.dense_config import LANES

_MIB = 2**20


class AttentionBlocks(Config):
    """Blocks of an attention. Each is a maximum: no block is longer than its axis, rounded up to 128.

    Attributes:
      block_q: query rows of a block.
      block_kv: keys of a block.
      chunk_q: query rows whose scores are made at a time, at most; a divisor of the block's is taken.
      span_kv: keys that are in vector memory at once. Forward: with their values. Backward: with the cotangents of
        both, in float32; more keys are taken one span after the other.
      vmem_limit_bytes: vector memory that the kernel may use.
    """

    block_q: int = Field(default=1024, gt=0, multiple_of=LANES)
    block_kv: int = Field(default=1024, gt=0, multiple_of=LANES)
    chunk_q: int = Field(default=512, gt=0, multiple_of=LANES)
    span_kv: int = Field(default=4096, gt=0, multiple_of=LANES)
    vmem_limit_bytes: int = Field(default=16 * _MIB, gt=0)


class AttentionConfig(AttentionBlocks):
    """Blocks of the forward of an attention.

    Attributes:
      part_kv: keys of a block that the stages of the kernel take at a time.
    """

    part_kv: int = Field(default=256, gt=0, multiple_of=LANES)


class AttentionVjpConfig(AttentionBlocks):
    """Blocks of the backward of an attention."""

    chunk_q: int = Field(default=256, gt=0, multiple_of=LANES)


_TAKEN = {np.dtype(dtype) for dtype in (np.float32, np.float16, jnp.bfloat16)}


def supports(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernels cannot compute this attention."""
    dtype = request["query"].dtype
    if dtype not in _TAKEN:
        return [Rejection("dtype", f"no attention of {dtype}", "astype float32 or bfloat16, or backend xla")]
    return []


def default_config(request: Request, device: Device) -> AttentionConfig:
    """Blocks of the forward kernel."""
    return AttentionConfig(vmem_limit_bytes=min(device.vmem_bytes or 16 * _MIB, 64 * _MIB))


def default_vjp_config(request: Request, device: Device) -> AttentionVjpConfig:
    """Blocks of the backward kernels."""
    return AttentionVjpConfig(vmem_limit_bytes=min(device.vmem_bytes or 16 * _MIB, 64 * _MIB))

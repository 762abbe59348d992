"""What the `chunk_fwd_h` kernels take on TPUs, and how they are tuned. Imports no Pallas."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.request import Request
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import LANES, SUBLANES, Sizes, vmem_bytes
from opmux.plugins.mosaic_tpu.chunk_fwd_h_table import layout

_KIB, _MIB = 2**10, 2**20
_TAKEN = {np.dtype(dtype) for dtype in (np.float32, jnp.bfloat16, np.float16)}
_TEMPORARIES = 2 * _MIB
"""Vector memory for what the compiler keeps besides the buffers of a kernel."""


class ChunkFwdHConfig(Config):
    """Blocks of the forward kernels. Each is a maximum: no block is longer than its axis.

    Attributes:
      block_tokens: tokens of a step where gates are per token, or constant; running sums take a chunk at a time.
      block_heads: heads of a step; 8 are the rows of a tile.
      block_values: value channels of a step.
      num_interleaved: heads whose work the compiler may interleave: more hide latencies, until registers spill.
      vmem_limit_bytes: vector memory that the kernel may use.
    """

    block_tokens: int = Field(default=64, gt=0, multiple_of=SUBLANES)
    block_heads: int = Field(default=SUBLANES, gt=0, multiple_of=SUBLANES)
    block_values: int = Field(default=256, gt=0, multiple_of=LANES)
    num_interleaved: int = Field(default=1, gt=0, le=SUBLANES)
    vmem_limit_bytes: int = Field(default=16 * _MIB, gt=0)


class ChunkFwdHVjpConfig(Config):
    """Blocks of the backward kernels, which take all channels at once. Each is a maximum.

    Attributes:
      block_tokens: tokens of a step where gates are per token, or constant; running sums take a chunk at a time.
      block_heads: heads of a step; 8 are the rows of a tile.
      vmem_limit_bytes: vector memory that the kernels may use.
    """

    block_tokens: int = Field(default=64, gt=0, multiple_of=SUBLANES)
    block_heads: int = Field(default=SUBLANES, gt=0, multiple_of=SUBLANES)
    vmem_limit_bytes: int = Field(default=16 * _MIB, gt=0)


def supports(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the forward kernels cannot take a request."""
    return _reasons(request, device, backward=False)


def supports_vjp(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the backward kernels cannot take a request."""
    return _reasons(request, device, backward=True)


def default_config(request: Request, device: Device) -> ChunkFwdHConfig:
    """All value channels in a step, where they fit."""
    tokens, values = _blocks(request, device, backward=False)
    interleaved = 2 if request["k"].dtype == jnp.bfloat16 else 1
    return ChunkFwdHConfig(
        block_tokens=tokens,
        block_values=values,
        num_interleaved=interleaved,
        vmem_limit_bytes=_capacity(device),
    )


def default_vjp_config(request: Request, device: Device) -> ChunkFwdHVjpConfig:
    """Chunks as long as in the forward, where they fit."""
    tokens, _ = _blocks(request, device, backward=True)
    return ChunkFwdHVjpConfig(block_tokens=tokens, vmem_limit_bytes=_capacity(device))


def _reasons(request: Request, device: Device, *, backward: bool) -> list[Rejection]:
    dtype = request["k"].dtype
    if dtype not in _TAKEN:
        why = "TPU vectors have no 64-bit numbers" if dtype.itemsize == 8 else "the kernels do not widen it"
        return [Rejection("dtype", f"k and v of {dtype}: {why}", "backend xla, or astype float32 or bfloat16")]
    if not (request["k"].size and request["v"].size):
        return []
    reasons: list[Rejection] = []
    tokens, values = _blocks(request, device, backward=backward)
    sizes = Sizes.of(request, tokens, SUBLANES, values)
    need, capacity = vmem_bytes(request, sizes, backward=backward) + _TEMPORARIES, _capacity(device)
    if need > capacity:
        detail = f"a step of {sizes.bt} tokens and {sizes.bh} heads needs {need / _MIB:.1f} MiB of vector memory, "
        detail += f"and there are {capacity / _MIB:.0f}"
        reasons.append(Rejection("config", detail, "a smaller chunk_size, or backend xla"))
    if "cu_seqlens" in request:
        words, room = layout(sizes).words * sizes.max_rows, (device.smem_bytes or _MIB) - 64 * _KIB
        if 4 * words > room:
            detail = f"the index table of {sizes.max_rows} chunks takes {4 * words} bytes of scalar memory, "
            detail += f"and there are {room}"
            reasons.append(Rejection("shape", detail, "a larger chunk_size, or fewer sequences in one call"))
    return reasons


def _blocks(request: Request, device: Device, *, backward: bool) -> tuple[int, int]:
    """Tokens and value channels of a step: the most of a few choices that fit."""
    V = request["v"].shape[-1]
    whole = max(LANES, -(-V // LANES) * LANES)
    choices = [(64, whole), (32, whole), (16, whole)] if backward else [(64, whole), (64, LANES), (16, LANES)]
    room = _capacity(device) - _TEMPORARIES
    for tokens, values in choices:
        if vmem_bytes(request, Sizes.of(request, tokens, SUBLANES, values), backward=backward) <= room:
            return tokens, values
    return choices[-1]


def _capacity(device: Device) -> int:
    """Vector memory that a kernel may have; a device that is not declared gets what every generation has."""
    return device.vmem_bytes or 16 * _MIB

"""What the attention kernels take on TPUs, and how they are tuned. Imports no Pallas."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.ops.attention_mask import hides
from opmux.core.request import Request
from opmux.plugins.mosaic_tpu.dense_config import LANES, SUBLANES, round_up

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
    """Reasons why the kernels cannot compute this attention, forward and backward alike."""
    reasons: list[Rejection] = []
    dtypes = {request["query"].dtype} | ({request["bias"].dtype} if "bias" in request else set())
    for dtype in sorted(dtypes - _TAKEN, key=str):
        why = f"TPU vectors have no {dtype}" if dtype.itemsize == 8 else f"Mosaic has no arithmetic of {dtype} vectors"
        reasons.append(Rejection("dtype", why, "astype float32 or bfloat16, or backend xla"))
    for bytes_of in (_forward_bytes, _backward_bytes):
        least = bytes_of(request, LANES, LANES, LANES, LANES)
        if not reasons and least > _vmem(device):
            H, Hv = request["query"].shape[-1], request["value"].shape[-1]
            reasons.append(
                Rejection(
                    "shape",
                    f"blocks of 128 queries and keys with {H} and {Hv} channels take {least / _MIB:.0f} MiB of vector "
                    f"memory, of {_vmem(device) // _MIB} MiB",
                    "fewer channels, bfloat16, or backend xla",
                )
            )
    return reasons


def default_config(request: Request, device: Device) -> AttentionConfig:
    """Blocks of the forward kernel: the largest that fit, since what surrounds the loop over blocks is paid for each.

    By the compiler's estimate of bfloat16 and 128 channels on v6e, chunks of 512 query rows take 4 % longer than
    chunks of 1024, which spill more, and blocks of 512 x 512 38 % longer than blocks of 1024 x 1024. Where nothing is
    masked, blocks of 1024 x 2048 take 7 % less again (4 % on v5e); of wider heads their code is twice as long for 2 %.
    Products of float32 are made of six: where masks need a second loop, blocks of 512 x 512 spill a quarter as much,
    and take from 5 % less (causal, 2,048 tokens) to 1 % more (4,096). Without masks they take 12 % more.
    """
    small = _exact(request) and _two_loops(request)
    q, kv, chunk = (512, 512, 256) if small else (1024, 1024, 512)
    S = request["key"].shape[1]
    narrow = max(request[name].shape[-1] for name in ("query", "value")) <= LANES
    # One block alone would leave the stages little to overlap.
    if narrow and not _exact(request) and not _two_loops(request) and S > 2048 and S % 2048 == 0:
        kv = 2048
    q, kv, chunk, span = _fit(_forward_bytes, request, device, q, kv, chunk, most=8192)
    return AttentionConfig(block_q=q, block_kv=kv, chunk_q=chunk, span_kv=span, vmem_limit_bytes=_vmem(device))


def default_vjp_config(request: Request, device: Device) -> AttentionVjpConfig:
    """Blocks of the backward kernels, chosen as those of the forward.

    Of float32 on v6e blocks of 512 x 512 take 2 to 9 % less with causal masks, where they spill a quarter as much as
    blocks of 1024 x 1024; without masks blocks of 512 x 1024 take 2 % more, and spill half as much.
    """
    exact = _exact(request)
    q, kv = 512 if exact else 1024, 512 if exact and _two_loops(request) else 1024
    q, kv, chunk, span = _fit(_backward_bytes, request, device, q, kv, chunk=256, most=32768)
    return AttentionVjpConfig(block_q=q, block_kv=kv, chunk_q=chunk, span_kv=span, vmem_limit_bytes=_vmem(device))


def _vmem(device: Device) -> int:
    """Vector memory to use: all of 16 MiB, three quarters of more, since XLA keeps what it fetches early in the rest.

    A device that is not declared, as in a simulation, gets what every generation has.
    """
    whole = device.vmem_bytes or 16 * _MIB
    return whole if whole <= 16 * _MIB else whole * 3 // 4


def _fit(
    bytes_of: Callable[[Request, int, int, int, int], float], request: Request, device: Device,
    q: int, kv: int, chunk: int, most: int,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Query rows and keys of a block, query rows of a chunk, and keys of a span, that fit in vector memory.

    Args:
      bytes_of: vector memory that such blocks take.
      request: the attention.
      device: where it is to run.
      q: query rows of a block, at most.
      kv: keys of a block, at most.
      chunk: query rows of a chunk, at most.
      most: keys of a span, at most.
    """
    T, S = (round_up(max(size, 1), LANES) for size in (request["query"].shape[1], request["key"].shape[1]))
    q = min(q, T)
    # Two chunks at least, so that the stages of one may overlap with those of the other.
    chunk = min(chunk, q if q == LANES else round_up(q // 2, LANES))
    q, kv = round_up(q, chunk), min(kv, S)
    span = min(round_up(S, kv), max(most // kv, 1) * kv)
    while bytes_of(request, q, kv, chunk, span) > 0.8 * _vmem(device):
        if span > max(kv, 2048):
            span = max(round_up(span // 2, kv), kv)
        elif kv > max(q // 2, LANES):
            kv = round_up(kv // 2, LANES)
            span = round_up(span // 2, kv)
        elif q > LANES:
            q = max(LANES, q // 2 // LANES * LANES)
            chunk = min(chunk, max(LANES, q // 2 // LANES * LANES))
            q = round_up(q, chunk)
        else:
            break
    return q, kv, chunk, span


def _exact(request: Request) -> bool:
    """Products are of float32."""
    return request["query"].dtype != jnp.bfloat16


def _two_loops(request: Request) -> bool:
    """The kernel has a loop for blocks with masks beside that for blocks without."""
    S = max(request["key"].shape[1], 1)
    return hides(request) or S % min(round_up(S, LANES), 1024) > 0


def _sizes(request: Request) -> tuple[int, int, int, int]:
    """Bytes of a number, channels of queries and of values as they lie along lanes, and bytes of masks a score."""
    item = 4 if _exact(request) else 2
    H, Hv = (round_up(max(request[name].shape[-1], 1), LANES) for name in ("query", "value"))
    masks = sum(size for name, size in (("bias", 8), ("mask", 2)) if name in request)
    return item, H, Hv, masks


def _forward_bytes(request: Request, q: int, kv: int, chunk: int, span: int) -> float:
    """Vector memory of the forward kernel: two blocks of each operand, scratch memory, and what is spilled."""
    item, H, Hv, masks = _sizes(request)
    span = kv if masks or "q_segments" in request else span
    blocks = 2 * item * (q * (H + Hv) + span * (H + Hv + SUBLANES)) + masks * q * kv
    return blocks + 4 * (Hv + SUBLANES) * q + (4 + item) * kv * chunk + 8 * kv * chunk + 1024 * (kv + q)


def _backward_bytes(request: Request, q: int, kv: int, chunk: int, span: int) -> float:
    """Vector memory of the larger backward kernel: as of the forward's, and the cotangents of a span of keys."""
    item, H, Hv, masks = _sizes(request)
    blocks = 2 * item * (q * (2 * H + Hv) + 2 * kv * (H + Hv)) + 2 * masks * q * kv
    return blocks + 4 * (H * q + span * (H + Hv)) + 4 * 5 * kv * chunk + 1024 * (kv + q)

"""Configs of the interpreted attention kernels: block sizes by shape. Imports no Pallas."""

from __future__ import annotations

from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.request import Request


class AttentionConfig(Config):
    """Block sizes of an interpreted attention kernel.

    A size above that of the problem is cut down to it; batch and head counts become divisors.

    Attributes:
      block_q: query rows of a block.
      block_kv: keys of a block.
      block_heads: key/value heads of a block, with all the query heads that read them.
      block_batch: batch elements of a block.
    """

    block_q: int = Field(512, gt=0)
    block_kv: int = Field(512, gt=0)
    block_heads: int = Field(1, gt=0)
    block_batch: int = Field(1, gt=0)


def supports(request: Request, device: Device) -> list[Rejection]:
    """Everything but `shard_map` with its replication checks."""
    if request.manual_axes:
        return [
            Rejection(
                "shard_map",
                "interpreted Pallas kernels mix values that vary over the mesh with constants that do not, "
                "which shard_map's replication checks refuse",
                "jax.shard_map(..., check_vma=False), or backend 'xla'",
            )
        ]
    return []


def priority(request: Request, device: Device) -> int | None:
    """Below plain XLA for self-attention of short sequences on a CPU: the scores fit its caches.

    There XLA is up to 1.5 times as fast, forward and backward, because it keeps the weights for the backward. It is
    slower with grouped heads and with few queries.
    """
    B, T, N, _ = request["query"].shape
    S, K = request["key"].shape[1:3]
    if device.platform != "cpu" or N != K or S > 16 * T:
        return None
    scores = T * S
    few = 2**18 if request["query"].dtype.itemsize == 2 else 2**16
    return -10 if scores <= 2**14 or scores <= min(few, 8 * few // max(B * N, 1)) else None


# XLA splits a product among threads by its rows, and wants about this many in a block to do so well; half as many do
# where blocks are short beside a diagonal. A block of scores of that many rows should stay in the caches.
_ROWS = 2048
_SCORES = 2**19


def default_config(request: Request, device: Device) -> AttentionConfig:
    """Blocks of the forward kernel: few and large, but short beside a diagonal or ends that cut work off."""
    return _blocks(request)


def default_vjp_config(request: Request, device: Device) -> AttentionConfig:
    """Blocks of the backward kernel."""
    return _blocks(request)


def _blocks(request: Request) -> AttentionConfig:
    B, T, N, _ = request["query"].shape
    S, K = request["key"].shape[1:3]
    B, T, S, G = max(B, 1), max(T, 1), max(S, 1), max(N // K, 1)
    if B * N * T * S <= _SCORES // 2:
        return AttentionConfig(block_q=T, block_kv=S, block_heads=max(K, 1), block_batch=B)
    cut = request.params.banded or any(name in request for name in ("q_lengths", "kv_lengths", "q_segments", "mask"))
    rows = _ROWS // 2 if cut else _ROWS
    q = _even(T, max(min(rows // G, max(128, min(512, T // 2)) if cut else rows), 1))
    heads = divisor(max(K, 1), rows // (G * q))
    batch = divisor(B, rows // (G * q * heads)) if heads == K else 1
    limit = max(_SCORES // (batch * heads * G * q), 256)
    kv = _even(S, min(limit, max(q, 256), 1024) if cut and T > 1 else limit)
    return AttentionConfig(block_q=q, block_kv=kv, block_heads=heads, block_batch=batch)


def divisor(size: int, limit: int) -> int:
    """The largest divisor of `size` that is at most `limit`, or 1."""
    return next((n for n in range(min(size, limit), 1, -1) if size % n == 0), 1)


def _even(size: int, limit: int) -> int:
    """The block size at most about `limit` that cuts `size` into blocks of one size, or nearly."""
    count = -(-2 * size // (3 * limit)) if size <= 1.5 * limit else -(-size // limit)
    block = -(-size // count)
    return block if block * count == size else -(-block // 16) * 16

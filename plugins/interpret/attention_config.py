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


def default_config(request: Request, device: Device) -> AttentionConfig:
    """Blocks of the forward kernel."""
    return AttentionConfig()


def default_vjp_config(request: Request, device: Device) -> AttentionConfig:
    """Blocks of the backward kernel."""
    return AttentionConfig()

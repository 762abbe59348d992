"""What the GPU kernels of `chunk_fwd_h` take, how channels are tiled, and how much shared memory that needs.

Imports no Pallas.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.ops.chunk_states import sequences
from opmux.core.request import Request
from opmux.plugins.mosaic_gpu.capability import SMEM_BYTES, size_rejections, wgmma_rejections

TILE = 64
"""Tokens that one product of a warpgroup sums over."""

CHANNELS = 64
"""Rows of the state, which are key channels, of a compute warpgroup."""

OUT_SLOTS = 2
"""States of a warpgroup that can be on their way to device memory."""

_WIDEST = 256
_DTYPES = tuple(map(np.dtype, (jnp.bfloat16, np.float16, np.float32)))


class ChunkFwdHConfig(Config):
    """Blocks of a walk along time.

    Attributes:
      block_v: value channels of a compute warpgroup.
      num_stages: tiles of tokens, or states that are read, which can be on their way.
      num_ctas: most blocks that run, each over many heads and sequences; one for each streaming multiprocessor by
        default.
    """

    block_v: int = Field(default=64, gt=0, le=128, multiple_of=64)
    num_stages: int = Field(default=2, gt=0, le=8)
    num_ctas: int = Field(default=132, gt=0)


@dataclass(frozen=True)
class Tile:
    """The channels of a block: of two compute warpgroups, one above the other or side by side.

    Attributes:
      size_k, size_v: channels of the request.
      columns: value channels of a warpgroup.
    """

    size_k: int
    size_v: int
    columns: int

    @property
    def stacked(self) -> bool:
        """Whether the warpgroups share values, and not keys."""
        return self.size_k > CHANNELS

    @property
    def k(self) -> int:
        """Key channels of a block."""
        return 2 * CHANNELS if self.stacked else CHANNELS

    @property
    def v(self) -> int:
        """Value channels of a block."""
        return self.columns if self.stacked else 2 * self.columns

    def parts(self, end: str) -> int:
        """Parts of a block along `k` or `v`: one that the warpgroups share, or one for each."""
        return 2 if self.stacked == (end == "k") else 1

    def part(self, end: str, warpgroup: Any) -> Any:
        """That of a warpgroup, as an array too where they share it: a product takes no constants from outside."""
        return warpgroup * (self.parts(end) - 1)

    def width(self, end: str) -> int:
        """Channels of a part."""
        return CHANNELS if end == "k" else self.columns

    def decay_copies(self, factors: Collection[str]) -> int:
        """Copies of the factors of a row, `state_k` and `state_v`."""
        return sum(self.parts(end) for end in ("k", "v") if f"state_{end}" in factors)

    @property
    def blocks_k(self) -> int:
        """Blocks along the key channels."""
        return -(-self.size_k // self.k)

    @property
    def blocks_v(self) -> int:
        """Blocks along the value channels."""
        return -(-self.size_v // self.v)

    def whole(self, end: str) -> int:
        """Channels of all blocks, along `k` or `v`."""
        return self.blocks_k * self.k if end == "k" else self.blocks_v * self.v

    def own(self, warpgroup: Any) -> tuple[Any, Any]:
        """The first key and value channel of a warpgroup in its block."""
        return self.part("k", warpgroup) * CHANNELS, self.part("v", warpgroup) * self.columns


def channels(size: int) -> int:
    """Channels that an array is padded to, so that TMA can cut it into swizzled tiles whatever its dtype."""
    return size + -size % (8 if size <= 32 else 64)


def whole_channels(size: int) -> int:
    """Channels in whole lines of shared memory."""
    return size + -size % 64


def tokens_stages(request: Request) -> int:
    """Tiles of keys, values and states that fit in shared memory at once, at most 2; 0 where XLA has to multiply."""
    if not on_tensor_cores(request):
        return 0
    K, V = (whole_channels(request[name].shape[-1]) for name in ("k", "v"))
    stage = 2 * (K * V + TILE * (K + V)) + 4 * (K + V + TILE)
    stage += 4 * TILE * (K * ("gk" in request) + V * ("gv" in request))
    return min(2, (SMEM_BYTES - 1024 - 2 * TILE * (K + V)) // stage)


def smem_bytes(request: Request, config: ChunkFwdHConfig) -> int:
    """Shared memory that the walk of a forward or a backward needs, beside its barriers."""
    tile = Tile(request["k"].shape[-1], request["v"].shape[-1], config.block_v)
    item = request["k"].dtype.itemsize
    stored = 4 if request.params.states_in_fp32 else item
    on_k, on_v = gated(request)
    stage = 4 * (tile.k * on_k + tile.v * on_v)
    weighed = 0
    if "d_h" in request or "d_ht" in request or not on_tensor_cores(request):
        stage += 2 * CHANNELS * config.block_v * (4 if stored == 4 or item == 4 else item)
    else:
        stage += TILE * (tile.k + tile.v) * item + 4 * (tile.k * on_k + tile.v * on_v + TILE)
        stage += 4 * TILE * (tile.k * ("gk" in request) + tile.v * ("gv" in request))
        weighed = 2 * TILE * item * (CHANNELS * on_k + config.block_v * on_v)
    return config.num_stages * stage + weighed + 2 * OUT_SLOTS * CHANNELS * config.block_v * stored


def gated(request: Request) -> tuple[bool, bool]:
    """Whether keys, and whether values, take weights before their product. Gates of a head act on the keys."""
    return any(name in request for name in ("g", "g_gamma", "gk")), "gv" in request


def on_tensor_cores(request: Request) -> bool:
    """Whether products are those of a warpgroup; float32 ones, which would be rounded there, are XLA's."""
    return request["k"].dtype.itemsize == 2


def supports(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernels cannot take a request, or its backward."""
    reasons = wgmma_rejections(device)
    dtype = request["k"].dtype
    if dtype not in _DTYPES:
        known = ", ".join(each.name for each in _DTYPES)
        reasons.append(Rejection("dtype", f"{dtype.name} is none of {known}", "cast it, or backend xla"))
    B, _, H, K = request["k"].shape
    states = B * request.params.num_splits * H * K * request["v"].shape[-1]
    return [*reasons, *size_rejections([*(spec.size for _, spec in request.operands), states])]


def default_config(request: Request, device: Device) -> ChunkFwdHConfig:
    """The widest blocks that still give every multiprocessor one, with as many stages as fit."""
    ctas = device.sm_count or 2
    fitting = [
        ChunkFwdHConfig(block_v=columns, num_stages=stages, num_ctas=ctas)
        for columns in (128, 64)
        for stages in (4, 3, 2, 1)
    ]
    fitting = [config for config in fitting if smem_bytes(request, config) <= SMEM_BYTES - 1024]
    pairs = sequences(request) * request["k"].shape[2]
    K, V = request["k"].shape[-1], request["v"].shape[-1]

    def worth(config: ChunkFwdHConfig) -> bool:
        tile = Tile(K, V, config.block_v)
        fills = pairs * tile.blocks_k * tile.blocks_v >= ctas
        return config.block_v == 64 or (fills and config.num_stages > 1 and V % tile.v == 0)

    return next(config for config in fitting if worth(config))

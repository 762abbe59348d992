"""What the GPU kernels of `reduce` take, and how they are tuned. Imports no Pallas."""

from __future__ import annotations

from pydantic import Field, model_validator

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.request import Request
from opmux.plugins.mosaic_gpu.capability import check_smem, device_rejections, dtype_rejections, size_rejections

LINE_BYTES = 128
"""Bytes of a row in a tile that is reduced along its rows: one swizzled line of shared memory."""

TILE_ROWS = 256
"""Rows of such a tile, half of them for each compute warpgroup."""


class ReduceConfig(Config):
    """Tiles of a reduction.

    Attributes:
      tile_r: elements of the reduced axis in one tile, where the axis is not the last one; for elements of four
        bytes, and twice as many for those of two.
      tile_n: columns of such a tile for each compute warpgroup.
      num_stages: tiles that can be on their way.
      num_ctas: most blocks that run, each over many tiles; one for each streaming multiprocessor by default. Long
        reductions are cut into as many parts as make work for all of them.
      tma_bytes: least bytes of the operand for which copies are left to TMA.
    """

    tile_r: int = Field(default=16, gt=0, le=128, multiple_of=4)
    tile_n: int = Field(default=256, gt=0, le=256, multiple_of=128)
    num_stages: int = Field(default=4, gt=0, le=8)
    num_ctas: int = Field(default=132, gt=0)
    tma_bytes: int = Field(default=1 << 20, ge=0)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: the stages of the larger kind of tile, and the results of one tile."""
        tile = max(2 * 4 * self.tile_r * self.tile_n, TILE_ROWS * LINE_BYTES)
        return self.num_stages * tile + 4 * 2 * max(self.tile_n, TILE_ROWS // 2)

    @model_validator(mode="after")
    def _fits(self) -> ReduceConfig:
        check_smem(self.smem_bytes, tile_r=self.tile_r, tile_n=self.tile_n, num_stages=self.num_stages)
        return self


def supports(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernels cannot take a request."""
    x, params = request["x"], request.params
    return [
        *device_rejections(device),
        *dtype_rejections([x.dtype, params.acc, params.dtype]),
        *size_rejections([x.size]),
    ]


def default_config(request: Request, device: Device) -> ReduceConfig:
    """One block for each streaming multiprocessor; two where a simulator stands in for the device."""
    return ReduceConfig(num_ctas=device.sm_count or 2)

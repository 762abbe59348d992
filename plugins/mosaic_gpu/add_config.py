"""What the GPU kernel of `add` takes, and how it is tuned. Imports no Pallas."""

from __future__ import annotations

from pydantic import Field, model_validator

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.request import Request
from opmux.plugins.mosaic_gpu.capability import check_smem, device_rejections, dtype_rejections, size_rejections


class AddConfig(Config):
    """Tiles of an addition.

    Attributes:
      tile_m: rows of a tile of four-byte elements, half of them for each compute warpgroup; twice as many rows
        for elements of two bytes.
      tile_n: columns of a tile.
      num_stages: tiles of each operand that can be on their way.
      num_ctas: most blocks that run, each over many tiles; one for each streaming multiprocessor by default.
      block_size: elements of a block that goes through registers alone, which small or uneven arrays do.
      tma_bytes: least bytes of the output for which copies are left to TMA.
    """

    tile_m: int = Field(default=16, gt=0, le=128, multiple_of=16)
    tile_n: int = Field(default=256, gt=0, le=256, multiple_of=128)
    num_stages: int = Field(default=4, gt=0, le=8)
    num_ctas: int = Field(default=132, gt=0)
    block_size: int = Field(default=4096, gt=0, multiple_of=1024)
    tma_bytes: int = Field(default=1 << 20, ge=0)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: the stages of both operands, two tiles of the output."""
        return 4 * self.tile_m * self.tile_n * (2 * self.num_stages + 2)

    @model_validator(mode="after")
    def _fits(self) -> AddConfig:
        check_smem(self.smem_bytes, tile_m=self.tile_m, tile_n=self.tile_n, num_stages=self.num_stages)
        return self


def supports(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernel cannot take a request."""
    x, y = request["x"], request["y"]
    size = 1
    for m, n in zip(x.shape, y.shape, strict=True):
        size *= max(m, n) if m and n else 0
    return [*device_rejections(device), *dtype_rejections([x.dtype]), *size_rejections([size])]


def default_config(request: Request, device: Device) -> AddConfig:
    """One block for each streaming multiprocessor; two where a simulator stands in for the device."""
    return AddConfig(num_ctas=device.sm_count or 2)

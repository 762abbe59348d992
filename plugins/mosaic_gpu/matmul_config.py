"""What the GPU kernel of `matmul` takes, and how it is tuned. Imports no Pallas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from pydantic import Field, model_validator

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.op import forward_request
from opmux.core.ops.matmul import OP, MatmulParams, outputs
from opmux.core.request import ArraySpec, Request
from opmux.plugins.mosaic_gpu.capability import SWIZZLED_LINE, check_smem, size_rejections, wgmma_rejections
from opmux.plugins.mosaic_gpu.matmul_elements import rejections

OUT_BYTES = 4 * 64 * SWIZZLED_LINE
"""Shared memory of the output: two slots of 64 rows for each of two warpgroups."""


class MatmulConfig(Config):
    """Tiles of a matrix product.

    Attributes:
      tile_m: rows of a tile, half of them for each compute warpgroup.
      tile_n: columns of a tile.
      tile_k: terms of one step for elements of two bytes; half or twice as many for those of four or of one.
      num_stages: steps that can be on their way.
      band: rows of tiles that neighbouring blocks go down before they move to the next column.
      cluster: whether two blocks that lie below each other (`m`) or beside each other (`n`) are a cluster, which
        loads the operand that both need only once.
      num_ctas: most blocks that run, each over many tiles; one for each streaming multiprocessor by default.
    """

    tile_m: Literal[128, 256] = 128
    tile_n: int = Field(default=256, gt=0, le=256, multiple_of=64)
    tile_k: int = Field(default=64, gt=0, le=256, multiple_of=64)
    num_stages: int = Field(default=4, gt=1, le=8)
    band: int = Field(default=16, gt=0)
    cluster: Literal["none", "m", "n"] = "none"
    num_ctas: int = Field(default=132, gt=0)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block: the stages of both operands, and the slots of the output."""
        return 2 * self.tile_k * (self.tile_m + self.tile_n) * self.num_stages + OUT_BYTES

    @property
    def registers(self) -> int:
        """Registers of a thread that the sums take."""
        return self.tile_m * self.tile_n // 256

    @model_validator(mode="after")
    def _fits(self) -> MatmulConfig:
        check_smem(
            self.smem_bytes, tile_m=self.tile_m, tile_n=self.tile_n, tile_k=self.tile_k, num_stages=self.num_stages
        )
        if self.registers > 128:
            raise ValueError(
                f"tile_m={self.tile_m}, tile_n={self.tile_n}: the sums take {self.registers} registers of a thread; "
                "at most 128 leave enough for the rest"
            )
        return self


def supports(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernel cannot take a request."""
    return _supports(request, [(request["a"], request["b"], outputs(request)["out"])], device)


def supports_vjp(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernel cannot take a request of the backward."""
    a, b, d_out = request["a"], request["b"], request["d_out"]
    return _supports(forward_request(OP, request), [(d_out, b, a), (a, d_out, b)], device)


def _supports(
    request: Request, products: Iterable[tuple[ArraySpec, ArraySpec, ArraySpec]], device: Device
) -> list[Rejection]:
    params: MatmulParams = request.params
    reasons = [*wgmma_rejections(device)]
    for left, right, out in products:
        reasons += rejections(left.dtype, right.dtype, out.dtype, params.precision, request["a"].shape[-1])
        reasons += size_rejections(spec.size for spec in (left, right, out))
    return list(dict.fromkeys(reasons))


_Tile = tuple[Literal[128, 256], int, float]

_TILES: tuple[_Tile, ...] = ((128, 256, 1.0), (256, 128, 1.0), (128, 192, 0.98), (128, 128, 0.9), (128, 64, 0.7))
"""Tiles, and how busy they can keep the tensor cores."""


def default_config(request: Request, device: Device) -> MatmulConfig:
    """The tile that wastes the least time; two blocks where a simulator stands in for the device."""
    spec = outputs(request)["out"]
    m, n = spec.shape[-2:]
    if all(size == 1 for size in request["b"].shape[:-2]):
        m = spec.size // max(1, n)  # the batch is part of the rows
    return _config(m, n, spec.size, device)


def default_vjp_config(request: Request, device: Device) -> MatmulConfig:
    """The tile that suits the larger of the cotangents."""
    spec = max((request[name] for name in request.wanted), key=lambda spec: spec.size, default=request["d_out"])
    return _config(spec.shape[-2], spec.shape[-1], spec.size, device)


def _config(m: int, n: int, size: int, device: Device) -> MatmulConfig:
    num_ctas = device.sm_count or 2
    batch = max(1, size // max(1, m * n))

    def cost(tile: _Tile) -> float:
        tile_m, tile_n, busy = tile
        tiles = batch * -(-m // tile_m) * -(-n // tile_n)
        return -(-tiles // num_ctas) * tile_m * tile_n / busy

    tile_m, tile_n, _ = min(_TILES, key=cost)
    stages = 4 if tile_m + tile_n > 256 else 6
    return MatmulConfig(tile_m=tile_m, tile_n=tile_n, num_stages=stages, num_ctas=num_ctas)

"""Blocks of a product by a model of its time on a device. Imports no Pallas.

    time = first blocks in + max(all steps but the last, all other bytes) + last step + last block out

Large blocks move fewer bytes and take fewer steps, small ones begin and end earlier. Bytes of all copies share the
bandwidth here, while the compiler's estimate gives each copy all of it: of 2048³ in bfloat16 on v6e it is 48,557 cycles
at 2048 x 2048 x 512, where the ends decide, as the model has it, but 42,176 at 1024³, where bytes do.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache

from opmux.core.devices import Device
from opmux.plugins.mosaic_tpu.dense_config import LANES, round_up
from opmux.plugins.mosaic_tpu.matmul_blocks import packed_rows, tile_bytes

_MIB = 2**20

STEP = 0.3e-6
"""Seconds that one step of the grid takes beside its work, by the compiler's estimates on v6e."""

COPY = STEP / 2
"""Seconds that the copies of a step take beside their bytes: of blocks that move as many bytes, larger ones win."""

CHUNK = 256
"""Columns and terms that are multiplied at a time; see `matmul_product`."""

_REGISTER_ROWS = 128
"""Rows of a block whose sums of one chunk of columns may stay in registers."""

_LARGEST = 2**31
"""Multiplications in one step. Its code is unrolled, and takes the compiler seconds."""

_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Sizes:
    """What decides the blocks of a product.

    Attributes:
      rows, columns, terms: of one element of the batch.
      batch: elements of the batch.
      summed: elements of the batch that are summed over.
      itemsizes: bytes of an element of the left factor, the right one and the result.
      pieces: of the factors; see `matmul_pieces`.
      products: passes through the matrix units.
      lanes: the rows of the left factor lie along lanes.
    """

    rows: int
    columns: int
    terms: int
    batch: int
    summed: int
    itemsizes: tuple[int, int, int]
    pieces: tuple[int, int]
    products: int
    lanes: bool


@lru_cache(maxsize=1024)
def blocks(sizes: Sizes, device: Device) -> tuple[int, int, int]:
    """Rows, columns and terms of a block."""
    row_multiple = LANES if sizes.lanes else packed_rows(min(sizes.itemsizes))
    candidates = itertools.product(
        _lengths(sizes.rows, row_multiple, 4096),
        _lengths(sizes.columns, LANES, 4096),
        _lengths(sizes.terms, CHUNK, 8192),
    )
    able = [(_seconds(block, sizes, device), block) for block in candidates if _fits(block, sizes, device)]
    smallest = tuple(min(size, LANES) for size in (sizes.rows, sizes.columns, sizes.terms))
    p, q, r = min(able)[1] if able else smallest
    return round_up(p, 2 * 8), round_up(q, LANES), round_up(r, LANES)


def _lengths(size: int, multiple: int, most: int) -> list[int]:
    """Lengths that cut an axis evenly, the whole axis first."""
    found = dict.fromkeys(min(size, round_up(-(-size // count), multiple)) for count in _COUNTS)
    return [length for length in found if length <= most] or [round_up(most, multiple)]


def _fits(block: tuple[int, int, int], sizes: Sizes, device: Device) -> bool:
    p, q, r = block
    several = r > CHUNK or sizes.products > 1
    if p > _REGISTER_ROWS and several and r >= sizes.terms and sizes.summed == 1:
        return False  # sums of one block that is the only one stay in registers, more than there are
    if p * q * r * sizes.products > _LARGEST:
        return False
    # Either axis of a factor may lie along lanes, by whether it is transposed.
    p, q, r = round_up(p, LANES) if sizes.lanes else p, round_up(q, LANES), round_up(r, LANES)
    tiles = ((p, r), (r, q), (p, q))
    needed = sum(2 * tile_bytes(tile, size) for tile, size in zip(tiles, sizes.itemsizes, strict=True))
    needed += sum(count * tile_bytes(tile, 2) for tile, count in zip(tiles, sizes.pieces, strict=False))
    return needed + tile_bytes((p, q), 4) <= budget(device)


def budget(device: Device) -> int:
    """Bytes of vector memory for blocks: half of it, since XLA keeps arrays there too, and what v4 has."""
    # A device that is not declared, as in a simulation, gets what every generation has.
    return max(12 * _MIB, device.vmem_bytes // 2)


def _seconds(block: tuple[int, int, int], sizes: Sizes, device: Device) -> float:
    p, q, r = block
    rows, columns, terms = (
        -(-size // length) for size, length in zip((sizes.rows, sizes.columns, sizes.terms), block, strict=True)
    )
    parallel = sizes.batch * rows * columns
    steps = parallel * sizes.summed * terms
    peak, bandwidth = device.peak("bf16") or 1e14, device.hbm_bandwidth or 1e12
    work = 2 * steps * max(p, _REGISTER_ROWS) * round_up(q, CHUNK) * round_up(r, LANES)
    left, right, out = (
        tile_bytes(tile, size) for tile, size in zip(((p, r), (r, q), (p, q)), sizes.itemsizes, strict=True)
    )
    # A block whose number stays the same from one step to the next is not copied again.
    moved = left * (steps if terms * sizes.summed > 1 else sizes.batch * rows)
    moved += right * (steps if terms * sizes.summed * columns > 1 else sizes.batch)
    moved += out * parallel
    cores = 2 if device.megacore and parallel > 1 else 1
    if device.megacore:
        peak, bandwidth = peak / 2, bandwidth / 2
    steps /= cores
    computing, copying = work * sizes.products / peak / cores, moved / bandwidth / cores
    ends = (left + right + out) / bandwidth
    overlapping = max(computing * (1 - 1 / steps) + steps * STEP, copying - ends + steps * COPY)
    return ends + overlapping + computing / steps

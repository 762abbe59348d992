"""What `add` and `reduce` take on TPUs, and how they are tuned. Imports no Pallas.

Both are bound by HBM: a block has to be long enough to hide what starting a copy costs. By the compiler's estimate
of an addition of two 4096 x 4096 float32 on v6e, blocks of 1 MiB take 15 % longer than blocks of 2 MiB, and those
2 % longer than blocks of 8 MiB; of a reduction, blocks of 4 MiB take 6 % longer than blocks of 8 MiB.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from pydantic import Field

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import Rejection
from opmux.core.ops.add import outputs
from opmux.core.ops.reduce import ReduceParams
from opmux.core.request import Request

_KIB, _MIB = 2**10, 2**20

LANES = 128
"""Lanes of a vector register, and elements of the last axis of a tile."""

SUBLANES = 8
"""Sublanes of a vector register."""

CHUNK = 128
"""Rows that are reduced in one turn of a loop: enough to hide the loop, and few enough to stay in registers."""

PACKED_ROWS = 32
"""Rows of a tile of 8-bit numbers, the most that any dtype has."""

SHORT = 16
"""Rows below which a register of 8 rows each of which is a sum of its own is better than 8 partial sums."""

STRIP_ROWS = 16
"""Rows that are added in one turn of a loop; a multiple of the rows of a tile of 16-bit numbers."""

STRIP_LANES = 4096
"""Lanes that are added in one turn of a loop, where there is one row only."""


class AddConfig(Config):
    """Blocks of an addition. Each is a maximum: no block is longer than its axis.

    Attributes:
      block_lanes: elements of the last axis in one block.
      block_rows: elements of the last axis but one.
      block_leading: elements of the axis before it, after leading axes that broadcast alike were merged.
      vmem_limit_bytes: vector memory that the kernel may use: two blocks of each array, since one is copied while
        the other is added, and temporaries.
    """

    block_lanes: int = Field(default=1024, gt=0, multiple_of=LANES)
    block_rows: int = Field(default=512, gt=0, multiple_of=SUBLANES)
    block_leading: int = Field(default=1, gt=0)
    vmem_limit_bytes: int = Field(default=16 * _MIB, gt=0)


class ReduceConfig(Config):
    """Blocks of a reduction of [A, R, B] over R. Each is a maximum: no block is longer than its axis, rounded up.

    Attributes:
      block_size: elements in one block: what `block_r` and `block_b` leave of it goes along A.
      block_r: elements of R in one block; partial results are kept in an accumulator between blocks.
      block_b: elements of B in one block.
      strip_lanes: lanes whose partial results stay in registers while the rows of a block are added to them.
      join_rows: where B is 1, rows whose lanes are joined in one turn of a loop.
      vmem_limit_bytes: vector memory that the kernel may use: two blocks of the input, two of the output, the
        accumulator, and temporaries.
    """

    block_size: int = Field(default=1 << 20, gt=0)
    block_r: int = Field(default=1024, gt=0, multiple_of=LANES)
    block_b: int = Field(default=1024, gt=0, multiple_of=LANES)
    strip_lanes: int = Field(default=128, gt=0, multiple_of=LANES)
    join_rows: int = Field(default=128, gt=0, multiple_of=LANES)
    vmem_limit_bytes: int = Field(default=16 * _MIB, gt=0)


_TAKEN = {np.dtype(dtype) for dtype in (np.float32, jnp.bfloat16, np.int32)}
_WIDENED = {np.dtype(np.int8), np.dtype(np.int16)}
_ELSEWHERE = "backend xla, or astype one of "


def supports_add(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernel cannot add these operands."""
    return _reject_dtype(request["x"].dtype, _TAKEN)


def supports_reduce(request: Request, device: Device) -> list[Rejection]:
    """Reasons why the kernels cannot make this reduction."""
    params: ReduceParams = request.params
    given, acc, dtype = request["x"].dtype, params.acc, params.dtype
    reasons = [
        reason for each in dict.fromkeys((given, acc, dtype)) for reason in _reject_dtype(each, _TAKEN | _WIDENED)
    ]
    if reasons:
        return reasons
    if params.kind == "mean" and acc.kind == "i":
        reasons.append(
            Rejection("dtype", f"no mean in {acc}: the vector unit does not divide integers", "dtype=float32")
        )
    if given.kind != "i" and acc in _WIDENED:
        # Shorter integers are reduced as int32 and cut off, which is not what converting a large float to them gives.
        reasons.append(Rejection("dtype", f"no {params.kind} of {given} in {acc}", "dtype=int32"))
    return reasons


def _reject_dtype(dtype: np.dtype[Any], taken: set[np.dtype[Any]]) -> list[Rejection]:
    if dtype in taken:
        return []
    if dtype.itemsize == 8 or jnp.issubdtype(dtype, jnp.complexfloating):
        why = f"TPU vectors have no {dtype}"
    elif dtype == np.float16:
        why = "Mosaic loads no float16 vectors"
    elif dtype.kind == "b":
        why = "Mosaic keeps booleans in memory as 32-bit integers, which takes more bytes than the addition itself"
    elif jnp.issubdtype(dtype, jnp.unsignedinteger):
        why = f"Mosaic has no reductions over unsigned integers, and no arithmetic of vectors of short ones ({dtype})"
    else:
        why = f"Mosaic has no arithmetic of {dtype} vectors"
    names = ", ".join(sorted(each.name for each in taken))
    return [Rejection("dtype", why, f"{_ELSEWHERE}{names}")]


def compute_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of registers in which numbers of another one are reduced: float32 or int32."""
    return np.dtype(np.float32 if jnp.issubdtype(dtype, jnp.floating) else np.int32)


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


def default_add_config(request: Request, device: Device) -> AddConfig:
    """Long rows first: of the 2 MiB or 4 MiB that one block may have, as much as the last axis can use."""
    out = outputs(request)["out"]
    rows, lanes = (max(1, size) for size in (1, 1, *out.shape)[-2:])
    # Elements are widened in registers where the device has no 16-bit arithmetic, so float32's size counts.
    size = _block_bytes(device, 4 * out.size, 2 * _MIB, 4 * _MIB) // 4
    # A row that is broadcast stays in registers while it is added to others.
    widest = 512 if device.vmem_bytes <= 16 * _MIB else 2048
    if out.shape[:-1] == () and lanes % (SUBLANES * LANES) == 0:
        rows, lanes = lanes // LANES, LANES  # as the kernel takes a vector
    lanes = min(round_up(lanes, LANES), size // STRIP_LANES * STRIP_LANES if rows == 1 else widest)
    rows = max(STRIP_ROWS, min(round_up(rows, STRIP_ROWS), size // lanes // STRIP_ROWS * STRIP_ROWS))
    return AddConfig(
        block_lanes=lanes,
        block_rows=rows,
        block_leading=max(1, size // (lanes * rows)),
        vmem_limit_bytes=_vmem_limit(device),
    )


def default_reduce_config(request: Request, device: Device) -> ReduceConfig:
    """Long rows first: of the 4 MiB or 8 MiB that one block may have, as much as the last axis can use."""
    x = request["x"]
    R, B = (max(1, size) for size in x.shape[-2:])
    # Elements are widened in VMEM, so the accumulator's size counts.
    size = _block_bytes(device, 4 * x.size, 4 * _MIB, 8 * _MIB) // 4
    # No longer than half of B: where a chip has two cores, each takes a half.
    b = min(round_up(-(-B // 2), LANES), 2048)
    r = 4096 if B == 1 else max(LANES, size // b // LANES * LANES)
    return ReduceConfig(
        block_size=size,
        block_r=min(r, round_up(R, LANES)),
        block_b=b,
        # On v4 the compiler spills what comes of longer ones.
        strip_lanes=LANES if device.vmem_bytes <= 16 * _MIB else 1024,
        join_rows=LANES if device.vmem_bytes <= 16 * _MIB else 512,
        vmem_limit_bytes=_vmem_limit(device),
    )


def _block_bytes(device: Device, nbytes: int, small: int, large: int) -> int:
    """Bytes of a block: by the device's memory, but no more than an eighth of the array, so that copies overlap."""
    most = large if device.vmem_bytes >= 64 * _MIB else small
    return max(256 * _KIB, min(most, nbytes // 8))


def _vmem_limit(device: Device) -> int:
    # A device that is not declared, as in a simulation, gets what every generation has.
    return min(32 * _MIB, device.vmem_bytes or 16 * _MIB)

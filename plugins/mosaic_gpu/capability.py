"""What every kernel of this backend needs of a device and of arrays. Imports no Pallas."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from opmux.core.devices import Device
from opmux.core.implementation import Rejection

SMEM_BYTES = 227 * 1024
"""Shared memory that a block of compute capability 9.0 or 10.x can have."""

SWIZZLED_LINE = 128
"""Bytes of the longest line of shared memory that is swizzled as one."""

MOST_ELEMENTS = 2**31 - 1
"""Offsets are 32-bit."""

_DTYPES = tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16, np.int32)))


def device_rejections(device: Device) -> list[Rejection]:
    """Reasons against a CUDA device. Any other platform is simulated, as a device that has what is needed."""
    return _capability_rejections(device, lambda found: found == (9, 0) or found[0] == 10, "kernels need 9.0 or 10.x")


def wgmma_rejections(device: Device) -> list[Rejection]:
    """Reasons against a CUDA device for kernels whose products are those of a warpgroup, `wgmma`.

    The instruction is of 9.0 alone, and a compiler that meets it for another device ends the process.
    """
    return _capability_rejections(device, lambda found: found == (9, 0), "wgmma is an instruction of 9.0 alone")


def _capability_rejections(device: Device, allowed: Callable[[tuple[int, int]], bool], need: str) -> list[Rejection]:
    if device.platform != "cuda":
        return []
    capability = device.compute_capability
    name = device.kind or device.name
    if capability is None:
        return [Rejection("capability", f"{name}: its compute capability is not known", need)]
    if allowed(capability):
        return []
    major, minor = capability
    return [Rejection("capability", f"{name} has compute capability {major}.{minor}; {need}", "backend xla")]


def check_smem(needed: int, **sizes: int) -> None:
    """Checks that what a block keeps in shared memory fits there, beside its barriers.

    Args:
      needed: bytes.
      sizes: what they come from, for the message.

    Raises:
      ValueError: it does not fit.
    """
    if needed > SMEM_BYTES - 1024:
        what = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{what} need {needed} bytes of shared memory; a block has {SMEM_BYTES - 1024} beside its barriers"
        )


def tiled_shape(rows: int, columns: int, itemsize: int, line: int = SWIZZLED_LINE) -> tuple[int, int]:
    """The smallest shape of a matrix that has this one in it and that TMA can cut into swizzled tiles.

    Those have eight rows of one line. Whatever is smaller than one is fine, but rows begin at multiples of 16 bytes.

    Args:
      rows, columns: of the matrix.
      itemsize: bytes of an element.
      line: bytes of a line.
    """
    wide = columns * itemsize > line
    return rows + (-rows % 8 if rows > 8 else 0), columns + -columns % ((line if wide else 16) // itemsize)


def dtype_rejections(dtypes: Iterable[np.dtype[Any]], known: tuple[np.dtype[Any], ...] = _DTYPES) -> list[Rejection]:
    """Reasons against dtypes that the kernels are not written for."""
    reasons: list[Rejection] = []
    for dtype in dict.fromkeys(map(np.dtype, dtypes)):
        if dtype in known:
            continue
        if dtype.itemsize == 8 and dtype.kind in "iuf":
            detail = f"{dtype.name}: 64-bit elements are not taken"
        else:
            detail = f"{dtype.name} is none of {', '.join(each.name for each in known)}"
        reasons.append(Rejection("dtype", detail, "cast it, or backend xla"))
    return reasons


def size_rejections(sizes: Iterable[int]) -> list[Rejection]:
    """Reasons against arrays that are too large for 32-bit offsets."""
    return [
        Rejection("shape", f"{size} elements; offsets are 32-bit, so at most {MOST_ELEMENTS}", "backend xla")
        for size in sizes
        if size > MOST_ELEMENTS
    ][:1]

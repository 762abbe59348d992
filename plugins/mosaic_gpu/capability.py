"""What every kernel of this backend needs of a device and of arrays. Imports no Pallas."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from opmux.core.devices import Device
from opmux.core.implementation import Rejection

SMEM_BYTES = 227 * 1024
"""Shared memory that a block of compute capability 9.0 or 10.x can have."""

MOST_ELEMENTS = 2**31 - 1
"""Offsets are 32-bit."""

_DTYPES = tuple(map(np.dtype, (np.float32, jnp.bfloat16, np.float16, np.int32)))


def device_rejections(device: Device) -> list[Rejection]:
    """Reasons against a CUDA device. Any other platform is simulated, as a device that has what is needed."""
    if device.platform != "cuda":
        return []
    capability = device.compute_capability
    if capability is None:
        return [
            Rejection(
                "capability",
                f"{device.kind or device.name}: its compute capability is not known",
                "kernels need 9.0 or 10.x",
            )
        ]
    if capability == (9, 0) or capability[0] == 10:
        return []
    major, minor = capability
    return [
        Rejection(
            "capability",
            f"{device.kind or device.name} has compute capability {major}.{minor}; kernels need 9.0 or 10.x",
            "backend xla",
        )
    ]


def dtype_rejections(dtypes: Iterable[np.dtype[Any]]) -> list[Rejection]:
    """Reasons against dtypes that the kernels are not written for."""
    reasons: list[Rejection] = []
    for dtype in dict.fromkeys(map(np.dtype, dtypes)):
        if dtype in _DTYPES:
            continue
        if dtype.itemsize == 8 and dtype.kind in "iuf":
            detail = f"{dtype.name}: 64-bit elements are not taken"
        else:
            detail = f"{dtype.name} is none of {', '.join(known.name for known in _DTYPES)}"
        reasons.append(Rejection("dtype", detail, "cast it, or backend xla"))
    return reasons


def size_rejections(sizes: Iterable[int]) -> list[Rejection]:
    """Reasons against arrays that are too large for 32-bit offsets."""
    return [
        Rejection("shape", f"{size} elements; offsets are 32-bit, so at most {MOST_ELEMENTS}", "backend xla")
        for size in sizes
        if size > MOST_ELEMENTS
    ][:1]

"""An estimate of the least time a kernel can take, from declared rates. Never a timing."""

from __future__ import annotations

from typing import Any

from opmux.certify import targets
from opmux.certify.results import CompileResult, Estimate
from opmux.core.devices import Device


def estimate(device: Device, *, flops: float, hbm_bytes: float, dtype: Any, cycles: float = 0.0) -> Estimate:
    """The longest of three times that overlap at best.

    Args:
      device: declared facts of the device.
      flops: operations, a multiply-add counting as two.
      hbm_bytes: bytes that cross device memory at least once.
      dtype: dtype of the operands, or a format of `Device.peaks`.
      cycles: the compiler's own estimate; 0 if it gives none.
    """
    peak = device.peak(dtype)
    hertz = clock(device)
    parts = {
        "memory": hbm_bytes / device.hbm_bandwidth if device.hbm_bandwidth else 0.0,
        "compute": flops / peak if peak else 0.0,
        "schedule": cycles / hertz if hertz else 0.0,
    }
    bound = max(parts, key=lambda name: parts[name])
    return Estimate(
        seconds=parts[bound],
        bound=bound,  # pyright: ignore[reportArgumentType]
        memory_seconds=parts["memory"],
        compute_seconds=parts["compute"],
        schedule_seconds=parts["schedule"],
    )


def with_estimate(result: CompileResult, dtype: str) -> CompileResult:
    """A result with its estimate.

    The cycles are the compiler's estimate of every kernel, or what its bundles come to where it gives none; none at
    all if a kernel has neither.
    """
    figures = [kernel.figures for kernel in result.kernels]
    if dtype == "f32" and any(each.get("wgmma") for each in figures):
        dtype = "tf32"  # no tensor core multiplies float32 unrounded
    cycles = [each.get("estimated_cycles") or each.get("bundle_cycles", 0.0) for each in figures]
    found = estimate(
        targets.target(result.target).device, flops=result.flops, hbm_bytes=result.hbm_bytes, dtype=dtype,
        cycles=sum(cycles) if all(cycles) else 0.0,
    )  # fmt: skip
    return result.model_copy(update={"estimate": found})


def clock(device: Device) -> float:
    """Cycles a second of a TPU core, worked out from its peak rate in bfloat16; 0 for other devices.

    Each matrix unit does `mxu_size`² multiply-adds a cycle. Units of 256 rows are declared with a rate of twice that,
    so half is taken for them. No vendor publishes the clocks of v6e and v7x: these two are assumptions.
    """
    operations = 2 * device.mxu_size**2 * device.mxu_count * device.cores
    if not operations:
        return 0.0
    return device.peak("bf16") / operations / (2 if device.mxu_size == 256 else 1)

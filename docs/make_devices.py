"""Writes `docs/devices.md` from `opmux.core.devices`: `python docs/make_devices.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from opmux.core import devices
from opmux.core.devices import Device

HEAD = """\
# Devices

opmux declares the facts of the devices below, so that `opmux explain --device h200` and
`registry.explain(..., device="h200")` work on a machine that has none. `opmux.core.devices.device(name)` looks
one up in any spelling (`h200`, `NVIDIA H200`, `v6e`, `TPU v6 lite`); `from_jax(jax_device)` describes a device
that is there, declared or not.

Every figure is of one JAX device. That is a whole chip everywhere but on TPU v7x, where a chip is two JAX
devices, so its figures are half of those that are published for the chip. Peak rates are dense, in units of
10¹² operations a second, a multiply-add counting as two. A dash is a figure that is not published or that the
device has no use for; in code it is 0.

This page is made by `python docs/make_devices.py`.
"""


def size(count: int) -> str:
    """`227 KiB`, `50 MiB`, `141 GB`: in the units in which the sources come out short."""
    if not count:
        return "-"
    if count % 2**30 and count >= 10**9:
        return f"{count / 1e9:g} GB"
    for unit, name in ((2**30, "GiB"), (2**20, "MiB")):
        if count >= unit:
            return f"{count / unit:g} {name}"
    return f"{count / 2**10:g} KiB"


def number(count: float) -> str:
    """A count, or a dash."""
    return f"{count:g}" if count else "-"


def rate(unit: float, dtype: str) -> Callable[[Device], str]:
    """The peak rate for a dtype, in a unit."""
    return lambda device: number(round(device.peak(dtype) / unit, 2))


def capability(device: Device) -> str:
    """`9.0`."""
    return ".".join(map(str, device.compute_capability or ()))


def bandwidth(device: Device) -> str:
    """Memory bandwidth in TB/s."""
    return number(device.hbm_bandwidth / 1e12)


MEMORY: dict[str, Callable[[Device], str]] = {
    "HBM": lambda device: size(device.hbm_bytes),
    "TB/s": bandwidth,
}
GPU: dict[str, Callable[[Device], str]] = {
    "device": lambda device: f"`{device.name}`",
    "capability": capability,
    "SMs": lambda device: number(device.sm_count),
    "SMEM a block": lambda device: size(device.smem_per_block),
    "SMEM an SM": lambda device: size(device.smem_per_sm),
    "registers an SM": lambda device: number(device.registers_per_sm),
    "a thread": lambda device: number(device.registers_per_thread),
    "threads an SM": lambda device: number(device.threads_per_sm),
    "warp": lambda device: number(device.warp_size),
    "L2": lambda device: size(device.l2_bytes),
    **MEMORY,
}
TPU: dict[str, Callable[[Device], str]] = {
    "device": lambda device: f"`{device.name}`",
    "cores a chip": lambda device: number(device.cores_per_chip),
    "megacore": lambda device: "yes" if device.megacore else "no",
    "VMEM a core": lambda device: size(device.vmem_bytes),
    "SMEM a core": lambda device: size(device.smem_bytes),
    "MXU": lambda device: f"{device.mxu_count} of {device.mxu_size} x {device.mxu_size}",
    **MEMORY,
}
PEAKS: dict[str, Callable[[Device], str]] = {
    "device": lambda device: f"`{device.name}`",
    "bfloat16": rate(1e12, "bfloat16"),
    "float16": rate(1e12, "float16"),
    "float32 as tf32": rate(1e12, "tf32"),
    "float32": rate(1e12, "float32"),
    "float64": rate(1e12, "float64"),
    "int8": rate(1e12, "int8"),
    "float8_e4m3fn": rate(1e12, "float8_e4m3fn"),
    "float8_e5m2": rate(1e12, "float8_e5m2"),
}


def table(columns: dict[str, Callable[[Device], str]], rows: Iterable[Device]) -> str:
    """A Markdown table with a column for each function."""
    lines = [list(columns), ["---"] * len(columns), *([cell(row) for cell in columns.values()] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def page() -> str:
    """The whole page."""
    declared = [devices.device(name) for name in devices.names()]
    gpus = [device for device in declared if device.platform == "cuda"]
    tpus = [device for device in declared if device.platform == "tpu"]
    sources = "".join(
        f"\n**{device.name}** (`{'`, `'.join((device.kind, *device.kinds))}`)\n\n"
        + "".join(f"* {source}\n" for source in device.sources)
        for device in (*gpus, *tpus)
    )
    return (
        f"{HEAD}\n## GPUs\n\n{table(GPU, gpus)}\n## TPUs\n\n{table(TPU, tpus)}"
        f"\n## Peak rates\n\n{table(PEAKS, (*gpus, *tpus))}"
        f"\nNothing is declared of `cpu` but its name.\n\n## Sources\n{sources}"
    )


if __name__ == "__main__":
    Path(__file__).with_name("devices.md").write_text(page(), encoding="utf-8")

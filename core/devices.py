"""Facts about devices, so that choices can be made and explained for devices that are not there.

Every figure is of one JAX device, which is a whole chip everywhere but on TPU v7x, where a chip is two
devices. Peak rates are dense: no structured sparsity. Nothing here initialises a JAX backend.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from opmux.core import compat
from opmux.core.errors import UnknownDeviceError

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30


@dataclass(frozen=True)
class Device:
    """Declared facts of one kind of device. A figure that is not known, or that it has no use for, is 0.

    Attributes:
      name: opmux's name for it (`h200`, `tpu-v6e`, `cpu`).
      platform: JAX platform (`cpu`, `cuda`, `rocm`, `tpu`).
      kind: what `jax.Device.device_kind` prints for it.
      compute_capability: of a CUDA device.
      kinds: further device kinds it goes by.
      sm_count: streaming multiprocessors.
      smem_per_block: most bytes of shared memory that one block can opt in to.
      smem_per_sm: bytes of shared memory of an SM.
      registers_per_sm: 32-bit registers of an SM.
      registers_per_thread: most 32-bit registers that one thread can use.
      threads_per_sm: most resident threads of an SM.
      warp_size: threads of a warp.
      l2_bytes: bytes of the L2 cache.
      cores_per_chip: TensorCores of a TPU chip.
      megacore: the TensorCores of the chip are one JAX device.
      vmem_bytes: vector memory of a TensorCore.
      smem_bytes: scalar memory of a TensorCore.
      mxu_size: rows and columns of a matrix unit.
      mxu_count: matrix units of a TensorCore.
      hbm_bytes: bytes of device memory.
      hbm_bandwidth: bytes a second of device memory.
      peaks: dense peak rates, `(format, operations a second)`, a multiply-add counting as two. Formats are
        dtypes as HLO prints them (`bf16`, `f32`, `s8`, `f8e5m2`), and `tf32` for float32 operands that the
        tensor cores round.
      sources: where the figures come from: `"field, field: document"`.
    """

    name: str
    platform: str
    kind: str = ""
    compute_capability: tuple[int, int] | None = None
    kinds: tuple[str, ...] = ()
    sm_count: int = 0
    smem_per_block: int = 0
    smem_per_sm: int = 0
    registers_per_sm: int = 0
    registers_per_thread: int = 0
    threads_per_sm: int = 0
    warp_size: int = 0
    l2_bytes: int = 0
    cores_per_chip: int = 0
    megacore: bool = False
    vmem_bytes: int = 0
    smem_bytes: int = 0
    mxu_size: int = 0
    mxu_count: int = 0
    hbm_bytes: int = 0
    hbm_bandwidth: float = 0.0
    peaks: tuple[tuple[str, float], ...] = ()
    sources: tuple[str, ...] = field(default=(), compare=False)

    def __hash__(self) -> int:
        """Of what tells devices apart: registries key caches with devices."""
        return hash((self.name, self.platform, self.kind))

    @property
    def devices_per_chip(self) -> int:
        """JAX devices of one chip: 2 on a TPU of two cores that are not one device, else 1."""
        return 1 if self.megacore else max(1, self.cores_per_chip)

    @property
    def cores(self) -> int:
        """TensorCores of one JAX device; 1 where there are none to count."""
        return self.cores_per_chip if self.megacore else 1

    def peak(self, dtype: Any) -> float:
        """Dense peak rate in operations a second for operands of a dtype; 0.0 if unknown.

        Takes dtypes, their names, and the formats of `peaks`. For `float32` it is the rate without rounding
        to `"tf32"`.
        """
        return dict(self.peaks).get(_format(dtype), 0.0)

    def to_json(self) -> dict[str, Any]:
        """Every attribute, as plain data that `json.dumps` takes."""
        return {**asdict(self), "peaks": dict(self.peaks), "devices_per_chip": self.devices_per_chip}


def _format(dtype: Any) -> str:
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    return _FORMATS.get(name, name.replace("float8_", "f8"))


_FORMATS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "int8": "s8", "uint8": "s8"}

_SMEM_PER_BLOCK = {
    (7, 0): 96 * _KIB, (7, 5): 64 * _KIB,
    (8, 0): 163 * _KIB, (8, 6): 99 * _KIB, (8, 7): 163 * _KIB, (8, 9): 99 * _KIB,
    (9, 0): 227 * _KIB, (10, 0): 227 * _KIB, (10, 3): 227 * _KIB, (12, 0): 99 * _KIB,
}  # fmt: skip

_GUIDE = (
    "smem_per_block, smem_per_sm, registers_per_sm, registers_per_thread, threads_per_sm, warp_size, "
    "compute_capability: CUDA C++ Programming Guide, technical specifications per compute capability"
)
_HOPPER = Device(
    "", "cuda", compute_capability=(9, 0), sm_count=132, smem_per_block=227 * _KIB, smem_per_sm=228 * _KIB,
    registers_per_sm=65536, registers_per_thread=255, threads_per_sm=2048, warp_size=32, l2_bytes=50 * _MIB,
    peaks=(
        ("bf16", 989.4e12), ("f16", 989.4e12), ("tf32", 494.7e12), ("f32", 66.9e12), ("f64", 66.9e12),
        ("s8", 1978.9e12), ("f8e4m3fn", 1978.9e12), ("f8e5m2", 1978.9e12),
    ),
)  # fmt: skip
_HOPPER_PAPER = "NVIDIA H100 Tensor Core GPU Architecture (white paper), H100 SXM5"
_TPU_TABLE = "jax.experimental.pallas.tpu.get_tpu_info, table of JAX 0.12"
_CLOUD = "Google Cloud TPU documentation, page"

_DECLARED = (
    Device("cpu", "cpu", "cpu"),
    Device(
        "a100", "cuda", "NVIDIA A100-SXM4-80GB", (8, 0),
        sm_count=108, smem_per_block=163 * _KIB, smem_per_sm=164 * _KIB,
        registers_per_sm=65536, registers_per_thread=255, threads_per_sm=2048, warp_size=32,
        l2_bytes=40 * _MIB, hbm_bytes=80 * 10**9, hbm_bandwidth=2039e9,
        peaks=(
            ("bf16", 312e12), ("f16", 312e12), ("tf32", 156e12), ("f32", 19.5e12), ("f64", 19.5e12),
            ("s8", 624e12),
        ),
        sources=(
            _GUIDE,
            "sm_count, l2_bytes: NVIDIA A100 Tensor Core GPU Architecture (white paper)",
            "hbm_bytes, hbm_bandwidth, peaks: NVIDIA A100 Tensor Core GPU (data sheet), 80GB SXM",
        ),
    ),
    replace(
        _HOPPER, name="h100", kind="NVIDIA H100 80GB HBM3",
        hbm_bytes=80 * 10**9, hbm_bandwidth=3.35e12,
        sources=(
            _GUIDE,
            f"sm_count, l2_bytes, peaks: {_HOPPER_PAPER}",
            "hbm_bytes, hbm_bandwidth: NVIDIA H100 Tensor Core GPU (data sheet), SXM",
        ),
    ),
    replace(
        _HOPPER, name="h200", kind="NVIDIA H200",
        hbm_bytes=141 * 10**9, hbm_bandwidth=4.8e12,
        sources=(
            _GUIDE,
            f"sm_count, l2_bytes, peaks: {_HOPPER_PAPER}: the same chip",
            "hbm_bytes, hbm_bandwidth: NVIDIA H200 Tensor Core GPU (data sheet), SXM",
        ),
    ),
    Device(
        "b200", "cuda", "NVIDIA B200", (10, 0),
        sm_count=148, smem_per_block=227 * _KIB, smem_per_sm=228 * _KIB,
        registers_per_sm=65536, registers_per_thread=255, threads_per_sm=2048, warp_size=32,
        l2_bytes=132644864, hbm_bytes=180 * 10**9, hbm_bandwidth=7.7e12,
        # The data sheet rounds to two figures and gives tensor rates with sparsity; halved here.
        peaks=(
            ("bf16", 2.25e15), ("f16", 2.25e15), ("tf32", 1.1e15), ("f32", 75e12), ("f64", 37e12),
            ("s8", 4.5e15), ("f8e4m3fn", 4.5e15), ("f8e5m2", 4.5e15),
        ),
        sources=(
            _GUIDE,
            "sm_count, l2_bytes: XLA's GPU target configuration of the B200",
            "hbm_bytes, hbm_bandwidth, peaks: NVIDIA Blackwell Architecture (data sheet), HGX B200, one GPU",
        ),
    ),
    Device(
        "tpu-v4", "tpu", "TPU v4", cores_per_chip=2, megacore=True,
        vmem_bytes=16 * _MIB, smem_bytes=_MIB, mxu_size=128, mxu_count=4,
        hbm_bytes=32 * _GIB, hbm_bandwidth=1200e9, peaks=(("bf16", 275e12), ("s8", 275e12)),
        sources=(
            f"cores_per_chip, megacore, vmem_bytes, smem_bytes, mxu_size, mxu_count: {_TPU_TABLE}",
            f"hbm_bytes, hbm_bandwidth, peaks: {_CLOUD} TPU v4",
        ),
    ),
    Device(
        "tpu-v5e", "tpu", "TPU v5 lite", kinds=("TPU v5e",), cores_per_chip=1,
        vmem_bytes=128 * _MIB, smem_bytes=_MIB, mxu_size=128, mxu_count=4,
        hbm_bytes=16 * _GIB, hbm_bandwidth=819e9, peaks=(("bf16", 197e12), ("s8", 393e12)),
        sources=(
            f"cores_per_chip, vmem_bytes, smem_bytes, mxu_size, mxu_count: {_TPU_TABLE}",
            f"hbm_bytes, hbm_bandwidth, peaks: {_CLOUD} TPU v5e",
        ),
    ),
    Device(
        "tpu-v5p", "tpu", "TPU v5", kinds=("TPU v5p",), cores_per_chip=2, megacore=True,
        vmem_bytes=64 * _MIB, smem_bytes=_MIB, mxu_size=128, mxu_count=4,
        # JAX's table has 2.46e12 B/s; the vendor's page is followed.
        hbm_bytes=95 * _GIB, hbm_bandwidth=2765e9, peaks=(("bf16", 459e12), ("s8", 918e12)),
        sources=(
            f"cores_per_chip, megacore, vmem_bytes, smem_bytes, mxu_size, mxu_count, peaks (s8): {_TPU_TABLE}",
            f"hbm_bytes, hbm_bandwidth, peaks (bf16): {_CLOUD} TPU v5p",
        ),
    ),
    Device(
        "tpu-v6e", "tpu", "TPU v6 lite", kinds=("TPU v6e",), cores_per_chip=1,
        vmem_bytes=128 * _MIB, smem_bytes=_MIB, mxu_size=256, mxu_count=2,
        hbm_bytes=32 * _GIB, hbm_bandwidth=1638e9,
        peaks=(("bf16", 918e12), ("s8", 1836e12), ("f8e5m2", 918e12)),
        sources=(
            f"cores_per_chip, vmem_bytes, smem_bytes, mxu_size, mxu_count: {_TPU_TABLE}",
            f"peaks (bf16, s8): {_CLOUD} TPU v6e",
            f"hbm_bytes, hbm_bandwidth, peaks (f8e5m2): {_CLOUD} TPU7x, column v6e",
        ),
    ),
    Device(
        "tpu-v7x", "tpu", "TPU7x", cores_per_chip=2,
        vmem_bytes=64 * _MIB, smem_bytes=_MIB, mxu_size=256, mxu_count=2,
        hbm_bytes=96 * _GIB, hbm_bandwidth=7380e9 / 2,
        peaks=(("bf16", 2307e12 / 2), ("f8e4m3fn", 4614e12 / 2), ("f8e5m2", 4614e12 / 2)),
        sources=(
            f"cores_per_chip, vmem_bytes, smem_bytes, mxu_size, mxu_count: {_TPU_TABLE}",
            f"hbm_bytes, hbm_bandwidth, peaks: {_CLOUD} TPU7x; halved, since it gives those of a chip",
        ),
    ),
)  # fmt: skip

_NICKNAMES = {"trillium": "tpu-v6e", "ironwood": "tpu-v7x", "tpu-v7": "tpu-v7x"}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _key(text: str) -> str:
    return _slug(text).removeprefix("nvidia-").removeprefix("tpu-")


_BY_NAME = {device.name: device for device in _DECLARED}
_BY_KIND = {kind: device for device in _DECLARED for kind in (device.kind, *device.kinds)}
_BY_KEY = {
    **{_key(nickname): _BY_NAME[name] for nickname, name in _NICKNAMES.items()},
    **{_key(kind): device for kind, device in _BY_KIND.items()},
    **{_key(name): device for name, device in _BY_NAME.items()},
}


def names() -> tuple[str, ...]:
    """The names of the declared devices."""
    return tuple(_BY_NAME)


def device(name: str) -> Device:
    """The declared device of a name, in any spelling: `tpu-v6e`, `v6e`, `TPU v6 lite`, `nvidia h200`.

    Raises:
      UnknownDeviceError: no device is declared under this name.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    key = _key(name)
    if key in _BY_KEY:
        return _BY_KEY[key]
    note = f"{name!r} is a platform: name a device of it." if key in ("cuda", "gpu", "rocm", "tpu") else ""
    raise UnknownDeviceError(name, names(), note=note)


@lru_cache(maxsize=1024)
def from_jax(device: Any) -> Device:
    """The facts of a `jax.Device`, or of a mesh's abstract device.

    One that is not declared is described by what JAX tells of it, and, on CUDA, by its compute capability.
    """
    kind = str(device.device_kind)
    if kind in _BY_KIND:
        return _BY_KIND[kind]
    platform = compat.device_platform(device)
    if platform == "cpu":
        return _BY_NAME["cpu"]
    capability = _capability(getattr(device, "compute_capability", None)) if platform == "cuda" else None
    return Device(
        _slug(kind) or platform, platform, kind, capability,
        sm_count=int(getattr(device, "core_count", None) or 0) if platform in ("cuda", "rocm") else 0,
        smem_per_block=_SMEM_PER_BLOCK.get(capability, 0) if capability else 0,
        sources=("sm_count, compute_capability: the JAX device", _GUIDE),
    )  # fmt: skip


def _capability(text: Any) -> tuple[int, int] | None:
    """`"9.0"` as `(9, 0)`; None for what is no such thing, as `gfx942` is not."""
    found = re.fullmatch(r"(\d+)\.(\d+)", str(text))
    return (int(found[1]), int(found[2])) if found else None

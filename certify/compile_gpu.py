"""The CUDA plugin and ptxas in a child process that has no GPU: what they dump, kernel by kernel."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from opmux.certify import measure_gpu
from opmux.certify.kernels import PallasCall
from opmux.certify.results import KernelMeasures
from opmux.certify.targets import Target

_PACKAGES = Path(sysconfig.get_paths()["purelib"], "nvidia")
TOOLS = (_PACKAGES / "cu13" / "bin", _PACKAGES / "cuda_nvcc" / "bin", _PACKAGES / "cuda_nvdisasm" / "bin")
"""Where packages put ptxas and nvdisasm."""

# What XLA wants to know of a device, in the fields that every supported version has.
_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: {device.warp_size}  shared_memory_per_block: 49152
  shared_memory_per_core: {device.smem_per_sm}  shared_memory_per_block_optin: {device.smem_per_block}
  threads_per_core_limit: {device.threads_per_sm}  core_count: {device.sm_count}  fpus_per_core: 128
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {device.hbm_bandwidth:.0f}  l2_cache_size: {device.l2_bytes}  clock_rate_ghz: 1.98
  device_memory_size: {device.hbm_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: {device.registers_per_sm}  registers_per_block_limit: {device.registers_per_sm}
}}
platform_name: "CUDA"  dnn_version_info {{ major: 9 minor: 10 patch: 0 }}  device_description_str: "{device.kind}"
"""

_folder: Path | None = None
_measured: dict[str, KernelMeasures] = {}


def environment() -> dict[str, str | None]:
    """Variables of a child."""
    return {"PATH": os.pathsep.join([*map(str, filter(Path.is_dir, TOOLS)), os.environ.get("PATH", os.defpath)])}


def start(scratch: Path, *, texts: bool = False) -> None:
    """Have the compiler dump into a folder of this process.

    Args:
      scratch: folder to make that folder in.
      texts: not used: all texts are needed for the measures.
    """
    global _folder
    if _folder is None:
        _folder = scratch / str(os.getpid())
        _folder.mkdir(parents=True)
        os.environ["MOSAIC_GPU_DUMP_TO"] = str(_folder)
        os.environ |= {f"MOSAIC_GPU_DUMP_{kind}": "1" for kind in ("PTX", "PTXAS", "SASS")}


def clear() -> None:
    """Forget what was dumped: some 25 MB a kernel."""
    assert _folder is not None
    for path in _folder.iterdir():
        path.unlink()


@cache
def topology(target: Target) -> Any:
    """The target's topology."""
    from jax.experimental import topologies

    assert target.device.compute_capability is not None
    major, minor = target.device.compute_capability
    config = _CONFIG.format(device=target.device, major=major, minor=minor)
    return topologies.get_topology_desc(
        platform="cuda", topology_name=target.topology, topology="1x1x1", target_config=config
    )


def measure(
    target: Target, text: str, hlo: str, calls: Sequence[PallasCall], keep: Path | None
) -> Iterator[KernelMeasures]:
    """Measures of every Mosaic kernel of a program that has just been compiled.

    The plugin compiles, and dumps, equal kernels once in a process, so measures are kept by the kernel's hash. That
    holds for one compute capability: a child compiles for one only.

    Args:
      target: not used.
      text: the lowered program, which names the kernels by their hashes.
      hlo: not used.
      calls: not used.
      keep: folder to keep dumped texts in.
    """
    assert _folder is not None
    hashes = list(dict.fromkeys(re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', text)))
    new = [each for each in hashes if each not in _measured]
    dumped = sorted(_folder.glob("*.ptx"), key=lambda path: path.stat().st_mtime_ns)
    if len(dumped) != len(new):
        raise RuntimeError(f"{len(new)} kernels were to be compiled, and {len(dumped)} were dumped")
    for each, path in zip(new, dumped, strict=True):
        _measured[each] = _read(path, keep)
    return iter([_measured[each] for each in hashes])


def _read(ptx: Path, keep: Path | None) -> KernelMeasures:
    paths = {kind: ptx.with_name(f"{ptx.stem}{suffix}") for kind, suffix in _SUFFIXES.items()}
    read = {kind: path.read_text(errors="replace") for kind, path in paths.items() if path.is_file()}
    with ptx.with_name(f"{ptx.stem}.mlir-passes.log").open(errors="replace") as file:
        passes = _first_pass(file)
    files: dict[str, str] = {}
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        for kind in read:
            files[kind] = str(shutil.copy(paths[kind], keep / f"{ptx.stem}.{kind}"))
        files["mosaic"] = str(keep / f"{ptx.stem}.mlir")
        Path(files["mosaic"]).write_text(passes)
    return KernelMeasures(
        kernel=re.sub(r"_\d+$", "", ptx.stem),
        figures=measure_gpu.figures(
            read.get("ptxas", ""),
            read.get("ptx", ""),
            read.get("sass", ""),
            passes,
            read.get("resources", ""),
            _assembled(measure_gpu.with_fixed_registers(read.get("ptx", ""))),
        ),
        warnings=measure_gpu.warnings(read.get("ptxas", "")),
        files=files,
    )


def _assembled(ptx: str) -> str:
    """What ptxas reports of a text, if there is one."""
    if not ptx:
        return ""
    target = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert target is not None
    command = ["ptxas", "--verbose", f"--gpu-name={target[1]}", "--output-file=/dev/null", "-"]
    done = subprocess.run(command, input=ptx, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ptxas, without setmaxnreg: {done.stderr or done.stdout}")
    return done.stderr + done.stdout


_SUFFIXES = {"ptx": ".ptx", "ptxas": ".ptxas", "sass": ".sass_ctrl", "resources": ".resources.txt"}


def _first_pass(lines: Any) -> str:
    kept: list[str] = []
    for line in lines:
        if line.startswith("// -----//") and kept:
            break
        kept.append(line)
    return "".join(kept)

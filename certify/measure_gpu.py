"""Static measures of a Mosaic GPU kernel: from ptxas' report, the PTX, and the machine code."""

from __future__ import annotations

import re
from collections import Counter

_REPORT = {
    "registers": r"Used (\d+) registers",
    "barriers": r"used (\d+) barriers",
    "stack_bytes": r"(\d+) bytes stack frame",
    "spill_store_bytes": r"(\d+) bytes spill stores",
    "spill_load_bytes": r"(\d+) bytes spill loads",
    "smem_static_bytes": r"(\d+) bytes smem",
    "local_bytes": r"(\d+) bytes lmem",
}
_PTX = {
    "wgmma": r"wgmma\.mma_async",
    "tcgen05_mma": r"tcgen05\.mma",
    "tma_loads": r"cp\.async\.bulk\.(?:tensor\.\dd\.)?shared::\w+\.global",
    "tma_stores": r"cp\.(?:reduce\.)?async\.bulk\.(?:tensor\.\dd\.)?global\.shared",
    "mbarrier_waits": r"mbarrier\.(?:try|test)_wait",
    "mbarrier_arrivals": r"mbarrier\.arrive",
    "stmatrix": r"stmatrix\.",
    "setmaxnreg": r"setmaxnreg\.",
}
_SASS = (
    "HGMMA",
    "QGMMA",
    "IGMMA",
    "UTCHMMA",
    "UTMALDG",
    "UTMASTG",
    "UBLKCP",
    "STSM",
    "LDSM",
    "LDG",
    "STG",
    "LDL",
    "STL",
)
_SHOWN_AT_ZERO = ("HGMMA", "UTMALDG", "UTMASTG", "LDL", "STL", "narrow_global")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[\w:]+)*)")
_WARNING = re.compile(r"^.*(?:\(C\d{4}\)|ptxas warning).*$", re.MULTILINE)


def figures(
    ptxas: str, ptx: str, sass: str = "", passes: str = "", resources: str = "", fixed: str = ""
) -> dict[str, float]:
    """Figures of one kernel.

    Args:
      ptxas: what ptxas reports.
      ptx: the PTX.
      sass: the disassembled machine code; empty if there was no nvdisasm.
      passes: the first of the MLIR passes' texts, which shows the launch.
      resources: JAX's own account of shared memory, where this version writes one.
      fixed: what ptxas reports of `with_fixed_registers`; empty if that was not compiled.

    Returns:
      `registers` a thread, `barriers`, `stack_bytes`, `spill_store_bytes`, `spill_load_bytes`, `local_bytes`,
      `smem_static_bytes`, `smem_dynamic_bytes`, `threads` a block; counts in the PTX: `wgmma`, `tma_loads`,
      `tma_stores`, `mbarrier_waits`, `mbarrier_arrivals`, `stmatrix`, `setmaxnreg`, `tcgen05_mma`; counts in the
      machine code by opcode (`HGMMA`, `UTMALDG`, `UTMASTG`, `UBLKCP` for TMA without a tensor, `LDL`, `STL`, ...),
      `instructions` without padding, and `narrow_global`: accesses to global memory of less than 16 bytes a thread;
      and where warpgroups trade registers, `fixed_registers` and `fixed_spill_bytes` of the code where they cannot.
    """
    found = {name: _first(pattern, ptxas) for name, pattern in _REPORT.items()}
    found["local_bytes"] = max(found["local_bytes"], found["stack_bytes"])
    found |= {name: float(len(re.findall(pattern, ptx))) for name, pattern in _PTX.items()}
    found["threads"] = _first(r"\.maxntid (\d+)", ptx)
    found["smem_dynamic_bytes"] = _dynamic_smem(passes) or _first(r"smem_scratch_bytes=(\d+)", resources)
    if fixed:
        found["fixed_registers"] = _first(_REPORT["registers"], fixed)
        found["fixed_spill_bytes"] = sum(_first(_REPORT[f"spill_{kind}_bytes"], fixed) for kind in ("store", "load"))
    return found | _machine_code(sass)


def with_fixed_registers(ptx: str) -> str:
    """The PTX as if ptxas ignored `setmaxnreg`; empty where there is none.

    It does so where it has to link what it compiles, as JAX has it do where libnvJitLink is loaded (C7504): each
    thread of a block then has an equal share of the registers, and a kernel that needs more spills.
    """
    fixed = re.sub(r"^\s*setmaxnreg\.[^\n]*\n", "", ptx, flags=re.MULTILINE)
    return fixed if fixed != ptx else ""


def warnings(ptxas: str) -> tuple[str, ...]:
    """Warnings and performance advisories (C7504, C7510, ...), in ptxas' own words, each once."""
    said = (re.sub(r"^ptxas (info|warning)\s*:\s*", "", line.strip()) for line in _WARNING.findall(ptxas))
    return tuple(dict.fromkeys(said))


def _machine_code(sass: str) -> dict[str, float]:
    if not sass:
        return {}
    found = Counter[str](dict.fromkeys(_SHOWN_AT_ZERO, 0))
    for opcode, modifiers in _INSTRUCTION.findall(sass):
        found["instructions"] += opcode != "NOP"
        if opcode in _SASS:
            found[opcode] += 1
        if opcode in ("LDG", "STG"):
            found["narrow_global"] += ".128" not in modifiers
    return {name: float(count) for name, count in found.items()}


def _dynamic_smem(passes: str) -> float:
    """What the launch asks for: `dynamic_shared_memory_size %n`, where `%n = arith.constant 1024 : i32`."""
    size = re.search(r"dynamic_shared_memory_size (%\S+)", passes)
    return _first(rf"{re.escape(size[1])} = arith\.constant (\d+)", passes) if size else 0.0


def _first(pattern: str, text: str) -> float:
    match = re.search(pattern, text)
    return float(match[1]) if match else 0.0

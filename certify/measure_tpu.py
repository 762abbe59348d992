"""Static measures of a TPU kernel, read from the texts that libtpu's compiler dumps.

A kernel's final schedule is a list of bundles, each of which issues in one cycle or more:

    final_bundles                           one line a bundle; `>` for each loop around it
    final_hlo-static-per-bundle-utilization the same lines: slots used of each unit
    post-delay-converter                    the allocations, with memory space, offset and size
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

_FILE = re.compile(r"\d+-(?P<op>.+)-\d+-(?P<kind>final_bundles|final_hlo-static\S*|post-delay-converter)\.txt")
_KINDS = {"final_bundles": "llo", "post-delay-converter": "allocations"}

_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s[^:]*:(?P<loops>[\s>]*)\{")
_ALLOCATION = re.compile(
    r"#allocation\w+ \[shape = '[^']*', space=(?P<space>\w+), size = (?P<size>0x[0-9a-f]+|\d+)"
    r"(?:, offset = (?P<offset>0x[0-9a-f]+|\d+))?"
)
_UNITS = {"VLOAD:FILL": "fills", "VSTORE:SPILL": "spills"}
_BY_DEPTH = ("salu", "xlu", "fills", "spills")


def dumped(name: str) -> tuple[str, str] | None:
    """The HLO op and the kind (`llo`, `slots`, `allocations`) of a dumped file; None if it is of no use."""
    match = _FILE.fullmatch(name)
    if match is None or match["op"].startswith("<"):  # code around the program
        return None
    return match["op"], _KINDS.get(match["kind"], "slots")


def figures(llo: str, slots: str, allocations: str = "") -> dict[str, float]:
    """Figures of one kernel.

    Args:
      llo: text of the final bundles.
      slots: text of the utilization of each bundle.
      allocations: text of the last pass that shows allocations.

    Returns:
      `bundles`, and `bundles@1` for those in one loop (the grid), `bundles@2` for those in two, and so on; slots
      used of each unit under its name in small letters (`salu`, `xlu`, `valu`, `mxu` or `matmul` and `matpush`, ...)
      with `fills` and `spills` of vector registers; `salu@1` and kin; `vmem_bytes` and `smem_bytes`.
    """
    depths = [match["loops"].count(">") for line in llo.splitlines() if (match := _BUNDLE.match(line))]
    units, rows = _slots(slots)
    found = Counter[str]({"bundles": len(depths), "fills": 0, "spills": 0})
    for depth in depths:
        found[f"bundles@{depth}"] += bool(depth)
    # The two files have a line for each bundle; should they not, sums are right and depths are unknown.
    for depth, row in zip(depths if len(depths) == len(rows) else [0] * len(rows), rows, strict=True):
        for unit, used in zip(units, row, strict=True):
            found[unit] += used
            if depth and unit in _BY_DEPTH:
                found[f"{unit}@{depth}"] += used
    kept = {name: float(count) for name, count in found.items() if count or name in ("fills", "spills", "salu", "xlu")}
    return kept | memory(allocations)


def memory(allocations: str) -> dict[str, float]:
    """`vmem_bytes` and `smem_bytes`: from the start of the first to the end of the last allocation of a kernel."""
    spaces: dict[str, list[tuple[int, int]]] = {"vmem": [], "smem": []}
    for match in _ALLOCATION.finditer(allocations):
        if match["space"] in spaces:
            start = int(match["offset"] or "0", 0)
            spaces[match["space"]].append((start, start + int(match["size"], 0)))
    return {f"{space}_bytes": float(_span(found)) for space, found in spaces.items() if allocations}


def _span(extents: list[tuple[int, int]]) -> int:
    return max(end for _, end in extents) - min(start for start, _ in extents) if extents else 0


def _slots(text: str) -> tuple[list[str], list[list[int]]]:
    """Units by the header, which differs between versions, and the slots used of them in each bundle."""
    head, _, table = text.partition("== UTILIZATION:")
    header = next((line for line in head.splitlines() if "VLOAD" in line), "")
    units = [name.strip() for name in header.split(",")]
    rows = [[int(count) for count in line.split()] for line in table.splitlines() if line.strip()]
    return [_UNITS.get(unit, unit.lower()) for unit in units], rows


def bundle_cycles(found: Mapping[str, float], steps: int | None) -> dict[str, float]:
    """`bundle_cycles`: bundles times how often the grid runs them, where the grid is the only loop.

    A lower bound on cycles where no branch skips bundles: waits for copies are not in it.
    """
    if steps is None or "bundles@2" in found:
        return {}
    inside = found.get("bundles@1", 0.0)
    return {"bundle_cycles": found["bundles"] - inside + inside * steps}


def estimated_cycles(profile: str) -> float:
    """Sum of XLA's own estimates in a static LLO profile."""
    return float(sum(map(int, re.findall(r"estimated_cycles: (\d+)", profile))))


def custom_calls(hlo: str) -> list[str]:
    """Names of the HLO ops that are Mosaic kernels."""
    return re.findall(r'%?([\w.-]+) = [^\n]*custom-call\([^\n]*custom_call_target="tpu_custom_call"', hlo)


def kernel_names(ops: Iterable[str]) -> dict[str, str]:
    """A kernel's own name for each HLO op: without HLO's number, unless two would have the same name."""
    plain = {op: re.sub(r"\.\d+$", "", op) for op in ops}
    often = Counter(plain.values())
    return {op: name if often[name] == 1 else op for op, name in plain.items()}

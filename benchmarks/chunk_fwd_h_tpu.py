"""`chunk_fwd_h` on TPUs that are not there: bundles for each chunk and head, scalar slots, spills.

    python benchmarks/chunk_fwd_h_tpu.py [--target tpu-v6e,tpu-v5e] [--heads 4] [--vjp] [--json FILE]

Every kernel is compiled by libtpu (`pip install 'opmux[certify]'`). A step of a kernel takes one chunk of all heads of
a block, and inside of it the heads some at a time, so what a step runs is at most

    bundles in the loop over chunks + turns of the loop over heads * bundles in loops inside of that

which is divided by the heads. Bundles that branches skip in most steps count as if they ran: those that open and close
a sequence, and the pieces of short chunks. Waits for copies do not count. Scalar slots are counted in the same way.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from opmux.certify.compiling import compile_jobs
from opmux.certify.job import CompileJob, Workload

STARTS = (0, 640, 640, 1000, 2048)

# name: dtype, packed, gates, kind of gates
CASES: dict[str, tuple[str, bool, tuple[str, ...], str]] = {
    "bf16 gk": ("bf16", False, ("gk",), "cumulative"),
    "bf16 gk packed": ("bf16", True, ("gk",), "cumulative"),
    "f32 gk": ("f32", False, ("gk",), "cumulative"),
    "f32 gk packed": ("f32", True, ("gk",), "cumulative"),
    "bf16 no gates": ("bf16", False, (), "cumulative"),
    "bf16 g": ("bf16", False, ("g",), "cumulative"),
    "bf16 g gk gv raw": ("bf16", False, ("g", "gk", "gv"), "raw"),
}


@dataclass(frozen=True)
class Row:
    """Figures of a kernel, for each chunk and head."""

    case: str
    target: str
    kernel: str
    bundles: float
    scalar_slots: float
    spills: int
    vmem_bytes: int


def workload(name: str, heads: int) -> Workload:
    """K = V = 128, chunks of 64, an initial state."""
    dtype, packed, gates, kind = CASES[name]
    T, sequences = STARTS[-1], len(STARTS) - 1 if packed else 1
    args: dict[str, Any] = dict.fromkeys(("k", "v"), f"{dtype}[1,{T},{heads},128]")
    args |= {gate: f"f32[1,{T},{heads}]" if gate == "g" else f"f32[1,{T},{heads},128]" for gate in gates}
    args["h0"] = f"f32[{sequences},{heads},128,128]"
    if packed:
        args["cu_seqlens"] = STARTS
    return Workload(name=name, args=args, params={"output_final_state": True, "chunk_size": 64, "gates": kind})


def measure(targets: Sequence[str], heads: int, op: str) -> Iterator[Row]:
    """A row for each kernel of each case on each target."""
    jobs = [
        CompileJob(backend="mosaic_tpu", op=op, workload=workload(name, heads), target=target)
        for name in CASES
        for target in targets
    ]
    block = min(heads, 8)
    for result in compile_jobs(jobs, parallel=1):
        if not result.kernels:
            raise SystemExit(f"{result.key}: {result.words}")
        turns = -(-block // int(str(result.config.get("num_interleaved", 1))))
        for kernel in result.kernels:
            figures = kernel.figures

            def of_step(unit: str, figures: Any = figures, turns: int = turns) -> float:
                return (figures.get(f"{unit}@1", 0) + turns * figures.get(f"{unit}@2", 0)) / block

            spills, vmem = int(figures["spills"]), int(figures["vmem_bytes"])
            yield Row(result.workload, result.target, kernel.kernel, of_step("bundles"), of_step("salu"), spills, vmem)


def main() -> None:
    parser = argparse.ArgumentParser(description="chunk_fwd_h on absent TPUs: static figures.")
    parser.add_argument("--target", default="tpu-v4,tpu-v5e,tpu-v5p,tpu-v6e,tpu-v7x", help="default: all five")
    parser.add_argument("--heads", type=int, default=4, help="default: 4")
    parser.add_argument("--vjp", action="store_true", help="the backward instead")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to a file")
    chosen = parser.parse_args()
    op = "chunk_fwd_h_vjp" if chosen.vjp else "chunk_fwd_h"
    rows = sorted(measure(chosen.target.split(","), chosen.heads, op), key=lambda row: (row.case, row.target))
    print(f"{'case':18} {'target':8} {'kernel':24} {'bundles':>8} {'scalar':>7} {'spills':>6} {'VMEM KiB':>9}")
    for row in rows:
        print(
            f"{row.case:18} {row.target:8} {row.kernel:24} {row.bundles:8.1f} {row.scalar_slots:7.1f} "
            f"{row.spills:6d} {row.vmem_bytes / 1024:9.0f}"
        )
    if chosen.json:
        Path(chosen.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    main()

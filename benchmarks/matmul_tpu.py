"""`matmul` on TPUs, by the compiler's estimates, beside the Pallas kernel that JAX brings. Needs opmux[certify].

    python benchmarks/matmul_tpu.py [--target tpu-v6e,tpu-v5e] [--only square,blocks,skinny,batch,backward]

All kernels of a target are compiled in one run by one compiler. JAX's kernel, `jax.experimental.pallas.ops.tpu.matmul`,
takes blocks that divide its axes: it stands here with the best of those that its compiler takes. Ours stands with the
config that it chooses by itself. Cycles are estimates of the compiler, and have been compared with no device.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

from estimates import ANY_SPILLS, cycles, ratio, said

from opmux.certify import CompileResult, Workload
from opmux.certify.compiling import compile_jobs
from opmux.certify.job import CompileJob
from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.implementation import BackendInfo, Implementation, Rejection
from opmux.core.request import Operands, Outputs, Request
from opmux.registry import hookimpl

SQUARE = "bf16[4096,4096]"
GROUPS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "square": (("4096³", SQUARE, SQUARE), ("2048³", "bf16[2048,2048]", "bf16[2048,2048]")),
    "skinny": (
        ("1 row", "bf16[1,4096]", SQUARE),
        ("8 rows", "bf16[8,4096]", SQUARE),
        ("100 rows", "bf16[100,4096]", SQUARE),
        ("1 column", SQUARE, "bf16[4096,1]"),
        ("200 terms", "bf16[4096,200]", "bf16[200,4096]"),
        ("odd", "bf16[1000,200]", "bf16[200,1000]"),
        ("odd and long", "bf16[1001,4099]", "bf16[4099,1003]"),
    ),
    "batch": (
        ("batch", "bf16[8,1024,512]", "bf16[8,512,1024]"),
        ("weights", "bf16[8,1024,512]", "bf16[512,1024]"),
        ("heads", "bf16[64,128,128]", "bf16[64,128,128]"),
    ),
}
JAX_BLOCKS = ((512, 512, 512), (1024, 1024, 512), (1024, 1024, 1024), (1024, 1024, 2048), (1024, 2048, 512))
"""Rows, columns and terms; larger ones do not fit in the vector memory that JAX's kernel asks for."""


class JaxConfig(Config):
    """Blocks of JAX's kernel."""

    block_m: int = 1024
    block_n: int = 1024
    block_k: int = 1024


@hookimpl
def opmux_backend() -> BackendInfo:
    """JAX's kernel as a backend, so that it is compiled and measured as ours is."""
    return BackendInfo("jax_pallas", platforms=("tpu",))


@hookimpl
def opmux_implementations() -> Iterator[Implementation]:
    """Its `matmul`, for two axes."""
    yield Implementation("matmul", kernel=jax_matmul, supports=_two_axes, config=JaxConfig)


def _two_axes(request: Request, device: Device) -> list[Rejection]:
    even = all(len(spec.shape) == 2 for _, spec in request.operands)
    return [] if even else [Rejection("shape", "two axes only")]


def jax_matmul(request: Request, operands: Operands, config: Config) -> Outputs:
    """JAX's kernel."""
    from jax.experimental.pallas.ops.tpu.matmul import matmul

    config = cast(JaxConfig, config)
    shape = (config.block_m, config.block_n)
    return {"out": matmul(operands["a"], operands["b"], block_shape=shape, block_k=config.block_k)}


def jobs(group: str, target: str) -> Iterator[tuple[str, CompileJob]]:
    """What is compiled, with the row that it belongs to."""
    backward = group == "backward"
    for name, a, b in GROUPS["square" if backward else group]:
        workload = Workload(name=name, args={"a": a, "b": b}, allowed_spills=ANY_SPILLS)
        op = "matmul_vjp" if backward else "matmul"
        yield name, CompileJob(backend="mosaic_tpu", op=op, workload=workload, target=target)
        if group == "square":
            for m, n, k in JAX_BLOCKS:
                yield name, CompileJob(
                    backend="jax_pallas", op="matmul", workload=workload, target=target,
                    config={"block_m": m, "block_n": n, "block_k": k}, plugins=("matmul_tpu",),
                )  # fmt: skip


def table(target: str, group: str, found: Sequence[tuple[str, CompileResult]]) -> str:
    """One row for each product: ours, JAX's best blocks, and the ratio."""
    lines = [f"{target}  {group}"]
    for name in dict.fromkeys(name for name, _ in found):
        mine = [result for row, result in found if row == name and result.backend == "mosaic_tpu"]
        theirs = [result for row, result in found if row == name and result.backend == "jax_pallas"]
        ours = mine[0]
        text = f"  {name:14} {_said(ours):>24}  bound {_bound(ours):>9}  blocks {_blocks(ours)}"
        best = min(theirs, key=cycles, default=None)
        if best is not None:
            text += f"  jax {said(cycles(best))} ({_blocks(best)})  ratio {ratio(cycles(ours), cycles(best))}"
        lines.append(text)
    return "\n".join(lines)


def _said(result: CompileResult) -> str:
    if result.status != "ok":
        return f"{result.status}: {result.words.splitlines()[0][:60] if result.words else ''}"
    return f"{said(cycles(result))} cycles" if cycles(result) < math.inf else said(math.inf)


def _bound(result: CompileResult) -> str:
    return result.estimate.bound if result.estimate is not None else ""


def _blocks(result: CompileResult) -> str:
    sizes = [str(value) for name, value in result.config.items() if "block" in name]
    return "x".join(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="tpu-v6e,tpu-v5e", help="names of devices")
    parser.add_argument("--only", default="square,skinny,batch,backward", help="groups to compile")
    parser.add_argument("--parallel", type=int, help="child processes at a time")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # children import this file as a plugin
    for target in options.target.split(","):
        for group in options.only.split(","):
            rows = list(jobs(group, target))
            names = {job.key: name for name, job in rows}
            found = [
                (names[result.key], result)
                for result in compile_jobs([job for _, job in rows], parallel=options.parallel)
            ]
            print(table(target, group, found), flush=True)


if __name__ == "__main__":
    main()

"""`attention` on TPUs, by the compiler's estimates, beside the Pallas kernel that JAX brings. Needs opmux[certify].

    python benchmarks/attention_tpu.py [--target tpu-v6e,tpu-v5e] [--only forward,backward] [--shapes D=128]

All kernels of a target are compiled in one run by one compiler. JAX's, `jax.experimental.pallas.ops.tpu.
flash_attention`, stands with the best of a few blocks, and repeats keys and values where heads are grouped. Ours
stands with the config that it chooses by itself. Only the kernels themselves are counted, and none of what XLA does
around them (JAX's backward spreads three vectors of rows over 128 lanes and more; ours lays operands out). Cycles are
estimates of the compiler, and have been compared with no device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from estimates import ANY_SPILLS, cycles, ratio, said

from opmux.certify import Workload
from opmux.certify.compiling import compile_jobs
from opmux.certify.job import CompileJob
from opmux.core.config import Config
from opmux.core.implementation import BackendInfo, Implementation
from opmux.core.request import Operands, Outputs, Request
from opmux.registry import hookimpl

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "D=128": ((1, 4096, 2, 128), (1, 4096, 2, 128)),
    "D=64": ((1, 4096, 2, 64), (1, 4096, 2, 64)),
    "GQA 8:1": ((1, 4096, 8, 128), (1, 4096, 1, 128)),
}
JAX_BLOCKS = ((512, 512), (512, 1024), (1024, 1024))
"""Query rows and keys; larger ones do not fit in the vector memory that JAX's kernel gets."""


class JaxConfig(Config):
    """Blocks of JAX's kernel."""

    block_q: int = 1024
    block_kv: int = 1024


@hookimpl
def opmux_backend() -> BackendInfo:
    """JAX's kernel as a backend, so that it is compiled and measured as ours is."""
    return BackendInfo("jax_flash", platforms=("tpu",))


@hookimpl
def opmux_implementations() -> Iterator[Implementation]:
    """Forward and backward."""
    yield Implementation("attention", kernel=jax_forward, config=JaxConfig)
    yield Implementation("attention_vjp", kernel=jax_backward, config=JaxConfig)


def jax_forward(request: Request, operands: Operands, config: Config) -> Outputs:
    """JAX's forward, of heads before rows."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    arrays = _heads_first(operands, ("query", "key", "value"))
    out = flash.flash_attention(*arrays, **_options(request), block_sizes=_sizes(config))
    return {"out": out.swapaxes(1, 2)}


def jax_backward(request: Request, operands: Operands, config: Config) -> Outputs:
    """JAX's backward, of a forward that left its log-sum-exp."""
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    query, key, value, out, d_out = _heads_first(operands, ("query", "key", "value", "out", "d_out"))
    top = operands["lse"].swapaxes(1, 2)
    options = _options(request)
    saved = (query, key, value, None, None, out, jnp.ones_like(top), top)
    backward: Any = flash._flash_attention_bwd  # pyright: ignore[reportPrivateUsage]
    found = backward(False, options["causal"], options["sm_scale"], _sizes(config), False, saved, d_out)
    found = [array.swapaxes(1, 2) for array in found[:3]]
    B, S, K, _ = operands["key"].shape
    found[1:] = [array.reshape(B, S, K, -1, array.shape[-1]).sum(3) for array in found[1:]]
    return dict(zip(("query", "key", "value"), found, strict=True))


def _heads_first(operands: Operands, names: tuple[str, ...]) -> list[Any]:
    import jax.numpy as jnp

    groups = operands["query"].shape[2] // operands["key"].shape[2]
    return [
        jnp.repeat(operands[name], groups if name in ("key", "value") else 1, axis=2).swapaxes(1, 2) for name in names
    ]


def _options(request: Request) -> dict[str, Any]:
    return {"causal": request.params.right == 0, "sm_scale": request.params.scale}


def _sizes(config: Config) -> Any:
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    config = cast(JaxConfig, config)
    q, kv = config.block_q, config.block_kv
    return flash.BlockSizes(
        block_b=1, block_q=q, block_k_major=kv, block_k=kv,
        block_q_major_dkv=q, block_q_dkv=q, block_k_major_dkv=kv, block_k_dkv=kv,
        block_q_dq=q, block_k_major_dq=kv, block_k_dq=kv,
    )  # fmt: skip


def jobs(which: str, target: str, shapes: list[str]) -> Iterator[tuple[str, CompileJob]]:
    """What is compiled, with the row that it belongs to."""
    op = "attention" if which == "forward" else "attention_vjp"
    for name in shapes:
        query, key = SHAPES[name]
        for causal in (True, False):
            row = f"{name} {'causal' if causal else 'full'}"
            args: dict[str, Any] = {"query": _text(query), "key": _text(key), "value": _text(key)}
            # Both spill: the scores of a block are more than registers hold.
            workload = Workload(name=row, args=args, params={"is_causal": causal}, allowed_spills=ANY_SPILLS)
            yield row, CompileJob(backend="mosaic_tpu", op=op, workload=workload, target=target)
            for q, kv in JAX_BLOCKS:
                yield row, CompileJob(
                    backend="jax_flash", op=op, workload=workload, target=target,
                    config={"block_q": q, "block_kv": kv}, plugins=("attention_tpu",),
                )  # fmt: skip


def _text(shape: tuple[int, ...]) -> str:
    return f"bf16[{','.join(map(str, shape))}]"


def _blocks(config: Mapping[str, Any]) -> tuple[Any, Any]:
    return config.get("block_q"), config.get("block_kv")


def main() -> None:
    """Prints one table for each target."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tpu-v6e,tpu-v5e")
    parser.add_argument("--only", default="forward,backward")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names of shapes")
    parser.add_argument("--parallel", type=int, help="child processes at a time")
    arguments = parser.parse_args()
    for target in arguments.target.split(","):
        for which in arguments.only.split(","):
            named = list(jobs(which, target, arguments.shapes.split(",")))
            compiled = compile_jobs([job for _, job in named], parallel=arguments.parallel)
            results = {(result.workload, result.backend, _blocks(result.config)): result for result in compiled}
            print(f"{target}  {which}, estimated cycles")
            for row in dict.fromkeys(row for row, _ in named):
                ours = cycles(next(found for key, found in results.items() if key[:2] == (row, "mosaic_tpu")))
                theirs = [cycles(results[row, "jax_flash", blocks]) for blocks in JAX_BLOCKS]
                each = "  ".join(f"{q}x{kv} {said(n)}" for (q, kv), n in zip(JAX_BLOCKS, theirs, strict=True))
                print(
                    f"  {row:16} {said(ours):>11}  of JAX's best {ratio(ours, min(theirs))}   JAX: {each}", flush=True
                )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()

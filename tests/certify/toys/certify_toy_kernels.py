"""Kernels of `add` that add, and some that do something else which a compiler has an opinion on."""

import os
import sys
import time

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def add(request, operands, config):
    x, y = operands["x"], operands["y"]
    if config.what == "abort":
        print("LLVM ERROR: Cannot select: intrinsic %llvm.nvvm.toy", file=sys.stderr, flush=True)
        os.abort()
    if config.what == "hang":
        time.sleep(1000)
    if request["x"].shape and jax.sharding.get_abstract_mesh().abstract_device.platform == "gpu":
        from certify_toy_gpu import KERNELS

        return {"out": KERNELS[config.what](x, y)}
    return {"out": TPU[config.what](x, y)}


def blocked(body, name, block=(256, 512), scratch=()):
    """A kernel on pairs of blocks."""

    def run(x, y):
        spec = pl.BlockSpec(block, lambda i, j: (i, j))
        grid = tuple(pl.cdiv(size, part) for size, part in zip(x.shape, block, strict=True))
        return pl.pallas_call(
            body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=grid, in_specs=[spec, spec], out_specs=spec,
            scratch_shapes=scratch, name=name,
        )(x, y)  # fmt: skip

    return run


def plain(x_ref, y_ref, out_ref):
    # Kernels may divide grid indices, which Pallas lowers by the device that it traces for.
    out_ref[...] = x_ref[...] + y_ref[...] + pl.program_id(0) // 3


def plain_with_scratch(x_ref, y_ref, out_ref, scratch_ref):
    scratch_ref[:256, :512] = x_ref[...]
    out_ref[...] = scratch_ref[:256, :512] + y_ref[...]


def spilling(x_ref, y_ref, out_ref):
    # All of a large block is live between the two statements.
    powers = jnp.exp(x_ref[...])
    out_ref[...] = powers * jnp.sum(powers * y_ref[...], axis=0, keepdims=True)


def branching(x, y):
    """A kernel that does its work or not by what a table says."""
    table = jnp.arange(8, dtype=jnp.int32)

    def body(table_ref, x_ref, y_ref, out_ref):
        @pl.when(table_ref[pl.program_id(0)] > 3)
        def _():
            out_ref[...] = x_ref[...] + y_ref[...]

    spec = pl.BlockSpec((x.shape[0] // 8, x.shape[1] // 8), lambda i, table_ref: (i, i))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1, grid=(8,), in_specs=[spec, spec], out_specs=spec, scratch_shapes=()
    )
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=shape, grid_spec=grid_spec, name="toy_branch")(table, x, y)


def two(x, y):
    """Two kernels with a transpose between them, which the cycle estimator cannot estimate."""
    first = blocked(plain, "toy_first")(x, y)
    return blocked(plain, "toy_second")(jnp.swapaxes(first, 0, 1), y)


TPU = {
    "plain": blocked(plain, "toy_plain"),
    "two": two,
    "vmem": blocked(plain_with_scratch, "toy_vmem", scratch=(pltpu.VMEM((2**16, 1024), jnp.float32),)),
    "spill": blocked(spilling, "toy_spill", block=(1024, 256)),
    "branch": branching,
}

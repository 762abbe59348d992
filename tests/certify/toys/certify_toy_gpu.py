"""Kernels for GPUs: without and by TMA, with more shared memory than there is, by `wgmma`, and trading registers."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu

ROWS = 64
WARPGROUP = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def direct(x_ref, y_ref, out_ref):
    rows = pl.ds(jax.lax.axis_index("block") * 8, 8)
    out_ref[rows] = x_ref[rows] + y_ref[rows]


def by_tma(x_ref, y_ref, out_ref, x_s, y_s, out_s, full):
    rows = pl.ds(jax.lax.axis_index("block") * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(x_ref.at[rows], x_s, full.at[0])
    plgpu.copy_gmem_to_smem(y_ref.at[rows], y_s, full.at[0])
    plgpu.barrier_wait(full.at[0])
    out_s[...] = x_s[...] + y_s[...]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_s, out_ref.at[rows])
    plgpu.wait_smem_to_gmem(0)


def trading(x_ref, y_ref, out_ref, *_):
    """Two warpgroups of three work on 144 numbers a thread, which takes more than a third of the registers."""
    warpgroup, block = jax.lax.axis_index("wg"), jax.lax.axis_index("block")

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(40, action="decrease")

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(232, action="increase")
        tile = (pl.ds(block * 2 * ROWS + warpgroup * ROWS, ROWS), pl.ds(0, 144))
        step = lambda _, xy: (xy[0] * 0.5 + xy[1], xy[1] * 0.5 + 1)  # noqa: E731
        x, y = jax.lax.fori_loop(0, 100, step, (x_ref[tile], y_ref[tile]))
        out_ref[tile] = x + y


def kernel(body, name, rows, scratch, **threads):
    def run(x, y):
        return plgpu.kernel(
            body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), scratch_types=scratch(x), grid=(x.shape[0] // rows,),
            grid_names=("block",), compiler_params=WARPGROUP, kernel_name=name, **threads,
        )(x, y)  # fmt: skip

    return run


def tiles(x):
    tile = plgpu.SMEM((ROWS, x.shape[1]), x.dtype)
    return [tile, tile, tile, plgpu.Barrier(num_arrivals=2, num_barriers=1)]


def wgmma(x, y):
    hopper_matmul_mgpu.get_num_sms = lambda *_: 132  # it would ask the default device
    config = hopper_matmul_mgpu.TuningConfig(tile_m=128, tile_n=128, tile_k=64, max_concurrent_steps=4)
    return hopper_matmul_mgpu.matmul(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), None, config)


KERNELS = {
    "plain": kernel(direct, "toy_direct", 8, lambda x: []),
    "tma": kernel(by_tma, "toy_tma", ROWS, tiles),
    "smem": kernel(by_tma, "toy_smem", ROWS, tiles),
    "trade": kernel(trading, "toy_trade", 2 * ROWS, lambda x: [], num_threads=3, thread_name="wg"),
    "wgmma": wgmma,
}

"""A backend of toy GPU kernels; the config says which mistake they make. Without one they are right.

`add` has one warpgroup that copies, and one that adds, which hand two slots to each other:

    HBM ─ TMA ─► x_s, y_s [slot] ─ + ─► o_s [slot] ─ TMA ─► HBM
          full[slot] ▶   ◀ empty[slot]
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.core.config import Config
from opmux.core.implementation import BackendInfo, Implementation
from opmux.registry import hookimpl

TILE = (64, 128)
SLOTS = 2

BUGS = (
    ("add", "missing wait for a copy"),
    ("add", "slot reused too early"),
    ("add", "missing commit before a store"),
    ("add", "missing wait before a slot is stored again"),
    ("add", "lost signal"),
    ("add", "wrong index"),
    ("add", "index out of bounds"),
    ("reduce", "uninitialised accumulator"),
    ("reduce", "two warpgroups on one tile"),
    ("matmul", "missing wait for a product"),
)


class Planted(Config):
    bug: str = ""


@hookimpl
def opmux_backend():
    return BackendInfo(
        "planted_gpu", platforms=("cuda",), tier="kernel", simulator="opmux.plugins.mosaic_gpu.simulator:simulate"
    )


@hookimpl
def opmux_implementations():
    yield Implementation("add", kernel="planted_gpu:add", config=Planted)
    yield Implementation("reduce", kernel="planted_gpu:reduce", config=Planted)
    yield Implementation("matmul", kernel="planted_gpu:matmul", config=Planted)


def launch(body, out, scratch, threads):
    return plgpu.kernel(
        body, out_type=out, scratch_types=scratch, grid=(1,), grid_names=("cta",), num_threads=threads,
        thread_name="wg", kernel_name="planted",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )  # fmt: skip


def add(request, operands, config):
    shape, size = operands["x"].shape, operands["x"].size
    tiles = -(-size // (TILE[0] * TILE[1]))
    x, y = (operands[name].reshape(-1) for name in ("x", "y"))
    x, y = (jnp.pad(a, (0, tiles * TILE[0] * TILE[1] - size)).reshape(tiles, *TILE) for a in (x, y))
    slots = plgpu.SMEM((SLOTS, *TILE), x.dtype)
    out = launch(
        functools.partial(_add, bug=config.bug, tiles=tiles),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        (
            slots, slots, slots, plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
            plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
        ),
        2,
    )(x, y)  # fmt: skip
    return {"out": out.reshape(-1)[:size].reshape(shape)}


def _add(x_g, y_g, o_g, x_s, y_s, o_s, full, empty, *, bug, tiles):
    @pl.when(lax.axis_index("wg") == 1)
    def _():
        def load(tile, _):
            slot = lax.rem(tile, SLOTS)

            @pl.when(tile >= (tiles if bug == "slot reused too early" else SLOTS))
            def _():
                plgpu.barrier_wait(empty.at[slot])

            source = tile
            if bug == "wrong index":
                source = tiles - 1 - tile
            if bug == "index out of bounds":
                source = tile + 1
            plgpu.copy_gmem_to_smem(x_g.at[source], x_s.at[slot], full.at[slot])
            if bug != "lost signal":
                plgpu.copy_gmem_to_smem(y_g.at[tile], y_s.at[slot], full.at[slot])

        lax.fori_loop(0, tiles, load, None)
        if bug != "slot reused too early":
            for tile in range(tiles - SLOTS, tiles):
                plgpu.barrier_wait(empty.at[tile % SLOTS])

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        def compute(tile, _):
            slot = lax.rem(tile, SLOTS)
            if bug != "missing wait for a copy":
                plgpu.barrier_wait(full.at[slot])
            if bug != "missing wait before a slot is stored again":
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
            o_s[slot] = x_s[slot] + y_s[slot]
            if bug != "missing commit before a store":
                plgpu.commit_smem()
            if bug != "slot reused too early":
                plgpu.barrier_arrive(empty.at[slot])
            plgpu.copy_smem_to_gmem(o_s.at[slot], o_g.at[tile])

        lax.fori_loop(0, tiles, compute, None)
        plgpu.wait_smem_to_gmem(0)


ROWS = 128


def reduce(request, operands, config):
    A, R, _ = operands["x"].shape
    rows, columns = -(-A // ROWS), -(-R // TILE[1])
    x = jnp.pad(operands["x"].reshape(A, R), ((0, rows * ROWS - A), (0, columns * TILE[1] - R)))
    out = launch(
        functools.partial(_reduce, bug=config.bug, rows=rows, columns=columns),
        jax.ShapeDtypeStruct((rows * ROWS,), x.dtype),
        (plgpu.SMEM((ROWS,), x.dtype),),
        2,
    )(x)
    return {"out": out[:A].reshape(A, 1)}


def _reduce(x_g, o_g, total_s, *, bug, rows, columns):
    def block(number, _):
        at = pl.ds(number * ROWS, ROWS)
        if bug != "uninitialised accumulator":
            total_s[...] = jnp.zeros((ROWS,), o_g.dtype)

        def add_tile(column, _):
            total_s[...] += x_g[at, pl.ds(column * TILE[1], TILE[1])].sum(1)

        lax.fori_loop(0, columns, add_tile, None)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(total_s, o_g.at[at])
        plgpu.wait_smem_to_gmem(0)

    @pl.when(lax.axis_index("wg") < (2 if bug == "two warpgroups on one tile" else 1))
    def _():
        lax.fori_loop(0, rows, block, None)


SIDE = 64


def matmul(request, operands, config):
    a, b = (operands[name].reshape(operands[name].shape[-2:]) for name in ("a", "b"))
    (M, K), N = a.shape, b.shape[1]
    steps = -(-K // SIDE)
    a = jnp.pad(a, ((0, SIDE - M), (0, steps * SIDE - K)))
    b = jnp.pad(b, ((0, steps * SIDE - K), (0, SIDE - N)))
    transforms = (plgpu.TilingTransform((8, SIDE)), plgpu.SwizzleTransform(128))
    tile = plgpu.SMEM((SIDE, SIDE), a.dtype, transforms=transforms)
    out = launch(
        functools.partial(_matmul, bug=config.bug, steps=steps),
        jax.ShapeDtypeStruct((SIDE, SIDE), request.params.dtype),
        (tile, tile, tile, plgpu.Barrier(num_arrivals=2, num_barriers=1)),
        1,
    )(a, b)
    return {"out": out[:M, :N].reshape(*operands["a"].shape[:-1], N)}


def _matmul(a_g, b_g, o_g, a_s, b_s, o_s, full, *, bug, steps):
    def accumulate(acc):
        def step(number, _):
            at = pl.ds(number * SIDE, SIDE)
            plgpu.copy_gmem_to_smem(a_g.at[:, at], a_s, full.at[0])
            plgpu.copy_gmem_to_smem(b_g.at[at, :], b_s, full.at[0])
            plgpu.barrier_wait(full.at[0])
            plgpu.wgmma(acc, a_s, b_s)
            if bug != "missing wait for a product":
                plgpu.wgmma_wait(0)

        lax.fori_loop(0, steps, step, None)
        return acc[...]

    o_s[...] = pl.run_scoped(accumulate, plgpu.ACC((SIDE, SIDE))).astype(o_s.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(o_s, o_g)
    plgpu.wait_smem_to_gmem(0)

"""A backend of toy TPU kernels; the config says which mistake they make. Without one they are right.

`add` copies by hand, through two slots:   HBM ─ DMA ─► x_v[slot] ─ + y ─► o_v[slot] ─ DMA ─► HBM
`reduce` is pipelined by blocks, with an accumulator that its last grid axis carries.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core.config import Config
from opmux.core.implementation import BackendInfo, Implementation
from opmux.registry import hookimpl

TILE = (8, 128)


BUGS = (
    ("add", "missing wait"),
    ("add", "slot reused too early"),
    ("add", "missing wait before a slot is stored again"),
    ("add", "missing wait at the end"),
    ("add", "lost signal"),
    ("reduce", "uninitialised accumulator"),
    ("reduce", "wrong index map"),
    ("reduce", "index out of bounds"),
    ("reduce", "parallel reduction axis"),
)


class Planted(Config):
    bug: str = ""


@hookimpl
def opmux_backend():
    return BackendInfo(
        "planted_tpu", platforms=("tpu",), tier="kernel", simulator="opmux.plugins.mosaic_tpu.simulator:simulate"
    )


@hookimpl
def opmux_implementations():
    yield Implementation("add", kernel="planted_tpu:add", config=Planted)
    yield Implementation("reduce", kernel="planted_tpu:reduce", config=Planted)


def add(request, operands, config):
    x, y = (operands[name].reshape(-1) for name in ("x", "y"))
    tiles = -(-x.size // (TILE[0] * TILE[1]))
    x, y = (jnp.pad(a, (0, tiles * TILE[0] * TILE[1] - a.size)).reshape(tiles, *TILE) for a in (x, y))
    slots = pltpu.VMEM((2, *TILE), x.dtype)
    out = pl.pallas_call(
        functools.partial(_add, bug=config.bug, tiles=tiles),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_shapes=[slots, slots, pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((2,))],
        name="planted_add",
    )(x, y)
    shape = operands["x"].shape
    return {"out": out.reshape(-1)[: operands["x"].size].reshape(shape)}


def _add(x_hbm, y_v, o_hbm, x_v, o_v, loaded, stored, *, bug, tiles):
    def load(tile, slot):
        return pltpu.make_async_copy(x_hbm.at[tile], x_v.at[slot], loaded.at[slot])

    def store(tile, slot):
        return pltpu.make_async_copy(o_v.at[slot], o_hbm.at[tile], stored.at[slot])

    def slot_of(tile):
        return 0 if bug == "slot reused too early" else lax.rem(tile, 2)

    load(0, 0).start()
    if bug == "lost signal":
        load(0, 1).wait()

    def step(tile, _):
        if bug != "missing wait":
            load(tile, slot_of(tile)).wait()

        @pl.when(tile + 1 < tiles)
        def _():
            load(tile + 1, slot_of(tile + 1)).start()

        slot = lax.rem(tile, 2)

        @pl.when(tile >= (tiles if bug == "missing wait before a slot is stored again" else 2))
        def _():
            store(tile - 2, slot).wait()

        o_v[slot] = x_v[slot_of(tile)] + y_v[tile]
        store(tile, slot).start()

    lax.fori_loop(0, tiles, step, None)
    if bug == "missing wait":  # semaphores end as they began all the same
        lax.fori_loop(0, tiles, lambda tile, _: load(tile, slot_of(tile)).wait(), None)
    if bug == "missing wait before a slot is stored again":
        lax.fori_loop(0, tiles - 2, lambda tile, _: store(tile, lax.rem(tile, 2)).wait(), None)
    if bug != "missing wait at the end":
        for tile in (tiles - 2, tiles - 1):
            store(tile, tile % 2).wait()


def reduce(request, operands, config):
    x = operands["x"]
    A, R, _ = x.shape
    a, r = 88, 128
    rows, steps = -(-A // a), -(-R // r)
    x = jnp.pad(x.reshape(A, R), ((0, rows * a - A), (0, steps * r - R)))
    index_map = {
        "wrong index map": lambda i, k: (k, i),
        "index out of bounds": lambda i, k: (i, k + 1),
    }.get(config.bug, lambda i, k: (i, k))
    lanes = pl.pallas_call(
        functools.partial(_reduce, bug=config.bug, steps=steps),
        grid=(rows, steps),
        in_specs=[pl.BlockSpec((a, r), index_map)],
        out_specs=pl.BlockSpec((a, r), lambda i, k: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((rows * a, r), x.dtype),
        scratch_shapes=[pltpu.VMEM((a, r), x.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel" if config.bug == "parallel reduction axis" else "arbitrary")
        ),
        name="planted_reduce",
    )(x)
    return {"out": lanes[:A].sum(-1, keepdims=True)}


def _reduce(x_ref, out_ref, total_ref, *, bug, steps):
    step = pl.program_id(1)
    if bug != "uninitialised accumulator":

        @pl.when(step == 0)
        def _():
            total_ref[...] = jnp.zeros_like(total_ref)

    total_ref[...] += x_ref[...]

    @pl.when(step == steps - 1)
    def _():
        out_ref[...] = total_ref[...]

"""The copies of the kernels for packed sequences: one stream an array, two slots a stream.

Each array in HBM has a buffer of two blocks in vector memory and two semaphores, `semaphores[stream, slot]`, so that
one block is on its way while the other one is computed on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core.request import Operands
from opmux.plugins.mosaic_tpu.chunk_fwd_h_blocks import Sizes
from opmux.plugins.mosaic_tpu.chunk_fwd_h_heads import copy_heads
from opmux.plugins.mosaic_tpu.chunk_fwd_h_table import IndexTable

CHANNELS = ("k", "v", "gk", "gv")
_HEAD_AXIS = {
    **dict.fromkeys((*CHANNELS, "g", "scalars", "states", "d_h"), 2), **dict.fromkeys(("h0", "d_ht"), 1), "g_gamma": 0,
}  # fmt: skip


def whole_blocks(operands: Operands, sizes: Sizes) -> tuple[dict[str, jax.Array], Sizes]:
    """Operands with as many heads as blocks of heads have, since a copy does not end within a tile."""
    bv = sizes.bv if sizes.V % sizes.bv == 0 else sizes.V
    heads = sizes.head_blocks * sizes.bh
    more = heads - sizes.H

    def pad(name: str, array: jax.Array) -> jax.Array:
        if not more or name not in _HEAD_AXIS:
            return array
        return jnp.pad(array, [(0, more if axis == _HEAD_AXIS[name] else 0) for axis in range(array.ndim)])

    return {name: pad(name, array) for name, array in operands.items()}, replace(sizes, H=heads, bv=bv)


def block(name: str, sizes: Sizes) -> tuple[int, ...]:
    """Shape of the block of an array in a step."""
    name = name.removeprefix("d_")
    if name in CHANNELS:
        return (sizes.bt, sizes.bh, sizes.K if name in ("k", "gk") else sizes.bv)
    return (sizes.bh, sizes.bt + 1) if name == "scalars" else (sizes.bh, sizes.K, sizes.bv)


def launch(
    kernel: Callable[..., None], index: IndexTable, inputs: Mapping[str, jax.Array], shapes: Mapping[str, Any],
    scratch: Mapping[str, Any], sizes: Sizes, *, grid: tuple[int, ...], vmem_limit: int, name: str,
) -> dict[str, jax.Array]:  # fmt: skip
    """Runs a kernel that moves everything itself.

    Args:
      kernel: called with the counts and the table of the index, `inputs` and outputs in HBM, their buffers, the
        semaphores of their streams, and the scratch, each by name.
      index: the rows to run.
      inputs: arrays by name.
      shapes: outputs by name.
      scratch: further memory by name.
      sizes: of the problem and its blocks.
      grid: blocks of heads, and of values where they are apart; none needs another one.
      vmem_limit: bytes of vector memory.
      name: the kernel's name.
    """
    arrays = {**inputs, **shapes}
    in_smem, in_hbm = pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[in_smem, in_smem, dict.fromkeys(inputs, in_hbm)],
        out_specs=dict.fromkeys(shapes, in_hbm),
        out_shape=dict(shapes),
        scratch_shapes=[
            {name: pltpu.VMEM((2, *block(name, sizes)), array.dtype) for name, array in arrays.items()},
            pltpu.SemaphoreType.DMA((len(arrays), 2)),
            dict(scratch),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * len(grid),
            vmem_limit_bytes=vmem_limit,
            # `index_table` keeps every index in range, whatever the offsets are.
            disable_bounds_checks=True,
        ),
        name=name,
    )(index.counts, index.table, dict(inputs))


class Copies:
    """Makes copies between arrays and the slots of their buffers; starting and waiting is up to the kernel.

    A wait needs a copy of the same size only, wherever it goes.
    """

    def __init__(self, hbm: Mapping[str, Any], buffers: Mapping[str, Any], semaphores: Any, sizes: Sizes):
        self._hbm, self._buffers, self._semaphores, self._bt = hbm, buffers, semaphores, sizes.bt
        self._stream = {name: number for number, name in enumerate(buffers)}
        # A block of all heads or values is not sliced, since a slice must be known to be whole tiles.
        self._heads = self._values = slice(None)
        if sizes.head_blocks > 1:
            self._heads = pl.ds(pl.multiple_of(pl.program_id(0) * sizes.bh, sizes.bh), sizes.bh)
        if sizes.value_blocks > 1:
            self._values = pl.ds(pl.multiple_of(pl.program_id(1) * sizes.bv, sizes.bv), sizes.bv)

    def tokens(self, name: str, start: Any, slot: Any, *, first: Any = 0, size: int = 0, out: bool = False) -> Any:
        """Tokens from `start` on: all of a block, or `size` of them from place `first` of the block on."""
        channels = self._values if name.endswith("v") else slice(None)
        hbm = self._hbm[name].at[0, pl.ds(start, size or self._bt), self._heads, channels]
        part = self._buffers[name].at[slot]
        return self._copy(name, hbm, part.at[pl.ds(first, size)] if size else part, slot, out)

    def scalars(self, name: str, row: Any, slot: Any, *, out: bool = False) -> Any:
        """Scalar exponents of a row of the index table."""
        return self._copy(name, self._hbm[name].at[0, row, self._heads], self._buffers[name].at[slot], slot, out)

    def states(self, name: str, at: tuple[Any, ...], slot: Any, *, out: bool = False) -> Any:
        """States of all heads, `at` a sequence or a row."""
        hbm = self._hbm[name].at[(*at, self._heads, slice(None), self._values)]
        return self._copy(name, hbm, self._buffers[name].at[slot], slot, out)

    def send_state(self, name: str, state: Any, goes: Any, sent: Any, sequence: Any) -> None:
        """Copies a state to that of a sequence where `goes` is 1; `sent` were before it, and took the slots in turn."""
        slot = sent & 1

        @pl.when(goes == 1)
        def _send() -> None:
            @pl.when(sent >= 2)
            def _free_slot() -> None:
                self.states(name, (jnp.int32(0),), slot, out=True).wait()

            copy_heads(self._buffers[name].at[slot], state)
            self.states(name, (sequence,), slot, out=True).start()

    def wait_for_sent(self, name: str, sent: Any) -> None:
        """Waits for the states that are still on their way."""
        for back in (1, 2):

            @pl.when(sent >= back)
            def _wait(slot: Any = (sent - back) & 1) -> None:
                self.states(name, (jnp.int32(0),), slot, out=True).wait()

    def _copy(self, name: str, hbm: Any, buffer: Any, slot: Any, out: bool) -> Any:
        ends = (buffer, hbm) if out else (hbm, buffer)
        return pltpu.make_async_copy(*ends, self._semaphores.at[self._stream[name], slot])

    def loads(self, row: Any, start: Any, slot: Any) -> Iterator[Any]:
        """What a chunk reads of its tokens."""
        for name in CHANNELS:
            if name in self._hbm:
                yield self.tokens(name, start, slot)
        if "scalars" in self._hbm:
            yield self.scalars("scalars", row, slot)

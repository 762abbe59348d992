"""The walk along time that the kernels of `chunk_fwd_h` share: a state in registers, from one stored row to the next.

A block takes one tile of channels of one sequence and head after another. Its two compute warpgroups own 64 rows of
the state each where there are more than 64 key channels, else columns; both are float32 in registers from the first
row of a sequence to the last. A memory warpgroup runs ahead of them, across tiles too.

    memory warpgroup                     compute warpgroup
    ────────────────                     ─────────────────
    what a step needs ── TMA ──► slots [stage]
                        full[stage] ──►  state ──► out_s [slot] ── TMA ──► out [row]
                                         state = decay * state + what the step adds
                       empty[stage] ◄──  (the next row stores to the other slot)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.chunk_fwd_h_config import CHANNELS, OUT_SLOTS, ChunkFwdHConfig, Tile, channels
from opmux.plugins.mosaic_gpu.chunk_fwd_h_decay import Refs
from opmux.plugins.mosaic_gpu.pallas import (
    COMPUTE_WARPGROUPS,
    MEMORY_WARPGROUP,
    barriers,
    count,
    drain,
    for_each,
    launch,
    load_tile,
    pad_to,
    padded_for_simulator,
    swizzled,
)


class Place(NamedTuple):
    """What a block is at: a sequence and a head, the first key and value channel, and the rows of the sequence."""

    sequence: Any
    batch: Any
    head: Any
    k: Any
    v: Any
    first_row: Any
    num_rows: Any


class Source(Protocol):
    """What a step of a walk loads, and what it makes of the state."""

    @property
    def steps(self) -> int:
        """Steps of a row."""
        ...

    @property
    def copies(self) -> int:
        """Copies of a step."""
        ...

    def scratch(self, stages: int) -> dict[str, Any]:
        """Shared memory by name."""
        ...

    def load(self, refs: Refs, place: Place, row: Any, step: Any, stage: Any) -> None:
        """Starts `copies` copies, which arrive at `refs["full"]`."""
        ...

    def take(self, refs: Refs, warpgroup: Any, stage: Any, state: jax.Array, first: bool) -> jax.Array:
        """The state after the step; `first` of its row."""
        ...


@dataclass(frozen=True)
class Walk:
    """Rows of states, [batch, rows, heads, K, V], along which a state is carried.

    Attributes:
      batch, rows, heads: sizes of the states that are stored.
      sequences: states that are carried, `batch` of them where the sequences are not packed.
      tile: channels of a block.
      packed: the rows of all sequences lie one after another, as the operand `first_row` [sequences + 1] has them.
      reverse: from the last row to the first.
      config: stages and blocks.
    """

    batch: int
    rows: int
    heads: int
    sequences: int
    tile: Tile
    packed: bool
    config: ChunkFwdHConfig
    reverse: bool = False

    @property
    def items(self) -> int:
        """Tiles of all sequences and heads."""
        return self.sequences * self.heads * self.tile.blocks_k * self.tile.blocks_v

    @property
    def ctas(self) -> int:
        """Blocks that run."""
        return min(self.config.num_ctas, self.items)

    def place(self, item: Any, refs: Refs) -> Place:
        """Where an item lies; tiles that share keys are neighbours."""
        item, v = lax.div(item, self.tile.blocks_v), lax.rem(item, self.tile.blocks_v)
        item, k = lax.div(item, self.tile.blocks_k), lax.rem(item, self.tile.blocks_k)
        n, head = lax.div(item, self.heads), lax.rem(item, self.heads)
        first, rows, batch = 0, self.rows, n
        if self.packed:
            first = refs["first_row"][n]
            rows, batch = refs["first_row"][n + 1] - first, 0
        return Place(n, batch, head, k * self.tile.k, v * self.tile.v, first, rows)

    def row(self, place: Place, index: Any) -> Any:
        """The row that is visited at an index."""
        return place.first_row + (place.num_rows - 1 - index if self.reverse else index)

    def __call__(
        self, source: Source, inputs: Mapping[str, jax.Array], start: jax.Array | None, dtype: Any, *, last: bool,
        name: str,
    ) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
        """Runs the walk.

        Args:
          source: what is taken up along the way.
          inputs: arrays that it loads, as TMA addresses them; `first_row` [sequences + 1] too where packed.
          start: states to start from, [sequences, heads, K, V] float32; 0 if None.
          dtype: of the states that are stored.
          last: also return the states at the end.
          name: of the kernel.

        Returns:
          The state before each row [batch, rows, heads, K, V], 0 in rows of no sequence, and the one at the end
          [sequences, heads, K, V] or None.
        """
        tile, stages = self.tile, self.config.num_stages
        K, V = tile.size_k, tile.size_v
        whole = (self.sequences, self.heads, tile.whole("k"), tile.whole("v"))
        arrays = dict(inputs)
        if start is not None:
            arrays["start"] = pad_to(start, whole)
        shape = (self.batch, self.rows, self.heads, channels(K), channels(V))
        shapes = {"out": jax.ShapeDtypeStruct(padded_for_simulator(shape, (1, 1, 1, tile.k, tile.v)), dtype)}
        if last:
            shapes["last"] = jax.ShapeDtypeStruct(whole, np.float32)
        scratch = {
            **source.scratch(stages),
            "out_s": swizzled((COMPUTE_WARPGROUPS, OUT_SLOTS, CHANNELS, tile.columns), dtype),
            "full": barriers(stages, source.copies),
            "empty": barriers(stages, COMPUTE_WARPGROUPS),
        }
        names = (*arrays, *shapes, *scratch)
        found = launch(
            lambda *refs: self._kernel(dict(zip(names, refs, strict=True)), source),
            tuple(shapes.values()), name=name, grid=self.ctas, scratch=tuple(scratch.values()), specialized=True,
            approx_math=True,
        )(*arrays.values())  # fmt: skip
        out = found[0][..., :K, :V]
        return out, found[1][..., :K, :V] if last else None

    def _kernel(self, refs: Refs, source: Source) -> None:
        warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
        num_items = count(cta, self.items, self.ctas)
        full, empty, stages = refs["full"], refs["empty"], self.config.num_stages

        @pl.when(warpgroup == MEMORY_WARPGROUP)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def item(number: Any, loaded: Any) -> Any:
                place = self.place(cta + number * self.ctas, refs)

                def step(index: Any, loaded: Any) -> Any:
                    stage = lax.rem(loaded, stages)

                    @pl.when(loaded >= stages)
                    def _() -> None:
                        plgpu.barrier_wait(empty.at[stage])

                    row = self.row(place, lax.div(index, source.steps))
                    source.load(refs, place, row, lax.rem(index, source.steps), stage)
                    return loaded + 1

                return lax.fori_loop(0, place.num_rows * source.steps, step, loaded)

            drain(empty, lax.fori_loop(0, num_items, item, jnp.int32(0)), stages)

        @pl.when(warpgroup < COMPUTE_WARPGROUPS)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")

            def item(number: Any, taken: Any) -> Any:
                place = self.place(cta + number * self.ctas, refs)
                own_k, own_v = self.tile.own(warpgroup)
                at = (pl.ds(place.k + own_k, CHANNELS), pl.ds(place.v + own_v, self.tile.columns))

                def take(state: jax.Array, taken: Any, first: bool) -> tuple[jax.Array, Any]:
                    stage = lax.rem(taken, stages)
                    plgpu.barrier_wait(full.at[stage])
                    state = source.take(refs, warpgroup, stage, state, first)
                    plgpu.barrier_arrive(empty.at[stage])
                    return state, taken + 1

                def row(index: Any, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
                    state, taken = carry
                    slot = refs["out_s"].at[warpgroup, lax.rem(lax.div(taken, source.steps), OUT_SLOTS)]
                    plgpu.wait_smem_to_gmem(OUT_SLOTS - 1, wait_read_only=True)  # the slot's last store was read
                    slot[...] = state.astype(slot.dtype)
                    plgpu.commit_smem()
                    target = refs["out"].at[(place.batch, self.row(place, index), place.head, *at)]
                    plgpu.copy_smem_to_gmem(slot, target)
                    state, taken = take(state, taken, True)
                    if source.steps > 1:
                        rest: Any = lambda _, carry: take(carry[0], carry[1], False)  # noqa: E731
                        state, taken = lax.fori_loop(1, source.steps, rest, (state, taken))
                    return state, taken

                start = jnp.zeros((CHANNELS, self.tile.columns), jnp.float32)
                if "start" in refs:
                    start = load_tile(refs["start"], (place.sequence, place.head, *at))
                state, taken = lax.fori_loop(0, place.num_rows, row, (start, taken))
                if "last" in refs:
                    refs["last"][(place.sequence, place.head, *at)] = state
                if self.packed:
                    self._clear(refs, place, warpgroup, at)
                return taken

            lax.fori_loop(0, num_items, item, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    def _clear(self, refs: Refs, place: Place, warpgroup: Any, at: tuple[Any, Any]) -> None:
        """Zeros in the rows past those of the last sequence."""
        used = place.first_row + place.num_rows

        @pl.when((place.sequence == self.sequences - 1) & (used < self.rows))
        def _() -> None:
            slot = refs["out_s"].at[warpgroup, 0]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            slot[...] = jnp.zeros((CHANNELS, self.tile.columns), slot.dtype)
            plgpu.commit_smem()

            def clear(row: Any) -> None:
                plgpu.copy_smem_to_gmem(slot, refs["out"].at[(place.batch, row, place.head, *at)])

            for_each(used, self.rows, clear)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

"""The walk along time that adds what it reads: `state = decay * state + added[row]`.

    added [row] ── TMA ──► added_s [stage] ──► registers, with the state

Forwards it adds up the products of float32 tokens, backwards the cotangents of the stored states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.chunk_fwd_h_config import CHANNELS, Tile, channels
from opmux.plugins.mosaic_gpu.chunk_fwd_h_decay import Refs, decay_scratch, decayed_state, load_decay
from opmux.plugins.mosaic_gpu.chunk_fwd_h_walk import Place, Walk
from opmux.plugins.mosaic_gpu.pallas import COMPUTE_WARPGROUPS, pad_for_simulator, pad_to, swizzled


@dataclass(frozen=True)
class Sums:
    """One state to add in each row.

    Attributes:
      tile: channels of a block.
      dtype: of what is added.
      factors: names of the factors of the state, of `state_k` and `state_v`.
    """

    tile: Tile
    dtype: Any
    factors: tuple[str, ...]
    steps: int = 1

    @property
    def copies(self) -> int:
        """Copies of a step."""
        return COMPUTE_WARPGROUPS + self.tile.decay_copies(self.factors)

    def scratch(self, stages: int) -> dict[str, Any]:
        """Shared memory by name."""
        shape = (stages, COMPUTE_WARPGROUPS, CHANNELS, self.tile.columns)
        return {"added_s": swizzled(shape, self.dtype), **decay_scratch(self.tile, self.factors, stages)}

    def load(self, refs: Refs, place: Place, row: Any, step: Any, stage: Any) -> None:
        """Starts the copies of a row."""
        del step  # a row is one step
        for warpgroup in range(COMPUTE_WARPGROUPS):
            k, v = self.tile.own(warpgroup)
            at = (pl.ds(place.k + k, CHANNELS), pl.ds(place.v + v, self.tile.columns))
            window = refs["added"].at[(place.batch, row, place.head, *at)]
            plgpu.copy_gmem_to_smem(window, refs["added_s"].at[stage, warpgroup], refs["full"].at[stage])
        load_decay(refs, self.tile, place, row, stage)

    def take(self, refs: Refs, warpgroup: Any, stage: Any, state: jax.Array, first: bool) -> jax.Array:
        """Decays the state, and adds."""
        del first  # and the only one
        state = decayed_state(refs, self.tile, warpgroup, stage, state)
        state = state + refs["added_s"][stage, warpgroup].astype(jnp.float32)
        plgpu.commit_smem()  # what was read must not be overwritten by the next copy before it was read
        return state


def add_up(
    walk: Walk, added: jax.Array, factors: Mapping[str, jax.Array], start: jax.Array | None, dtype: Any, *, last: bool,
    name: str,
) -> tuple[jax.Array, jax.Array | None]:  # fmt: skip
    """The states before each row and at the end, as `Walk` returns them.

    Args:
      walk: rows and blocks.
      added: [batch, rows, heads, K, V].
      factors: any of `state_k`, `state_v`, and `first_row` of packed sequences.
      start: states to start from, or None.
      dtype: of the states before rows.
      last: return the states at the end.
      name: of the kernel.
    """
    tile = walk.tile
    shape = (*added.shape[:3], channels(added.shape[3]), channels(added.shape[4]))
    added = pad_for_simulator(pad_to(added, shape), (1, 1, 1, tile.k, tile.v))
    names = tuple(name for name in ("state_k", "state_v") if name in factors)
    source = Sums(tile, added.dtype, names)
    return walk(source, {"added": added, **factors}, start, dtype, last=last, name=name)

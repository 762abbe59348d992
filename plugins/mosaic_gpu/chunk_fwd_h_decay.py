"""Decay in registers: weights of tokens, and factors of the state, as the kernels of `chunk_fwd_h` apply them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.chunk_fwd_h_config import CHANNELS, Tile

if TYPE_CHECKING:
    from opmux.plugins.mosaic_gpu.chunk_fwd_h_walk import Place

Refs = Mapping[str, Any]
"""Operands by name, and shared memory by name with `_s` at its end."""

_LOG2E = 1.4426950408889634


def along(vector: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """A vector in registers as a matrix that varies along one axis."""
    return lax.broadcast_in_dim(vector, shape, (axis,))


def weights(refs: Refs, end: str, at: tuple[Any, ...], shape: tuple[int, int], columns: Any) -> jax.Array | None:
    """The weights of a tile of keys or values, or None where no gate acts on them.

    Args:
      refs: the gates of the tile, as far as they act.
      end: `k` or `v`.
      at: where they lie, the stage first.
      shape: of the tile.
      columns: the channels.
    """
    logs: list[jax.Array] = []
    if f"after_{end}_s" in refs:
        after = refs[f"after_{end}_s"][(*at, slice(None), columns)]
        if f"base_{end}_s" in refs:
            after = along(refs[f"base_{end}_s"][(*at, columns)], shape, 1) - after
        logs.append(after)
    if end == "k" and "head_s" in refs:
        logs.append(along(refs["head_s"][at[0]], shape, 0))
    return jnp.exp2(sum(logs[1:], logs[0]) * _LOG2E) if logs else None


def decayed_state(refs: Refs, tile: Tile, warpgroup: Any, stage: Any, state: jax.Array) -> jax.Array:
    """The state times its factors over a row, as far as there are any."""
    for axis, end in enumerate(("k", "v")):
        if f"state_{end}_s" in refs:
            factor = refs[f"state_{end}_s"][stage, tile.part(end, warpgroup)]
            state = state * along(factor, (CHANNELS, tile.columns), axis)
    return state


def decay_scratch(tile: Tile, factors: Collection[str], stages: int) -> dict[str, Any]:
    """Shared memory of the factors of a row, `state_k` and `state_v`."""
    return {
        f"state_{end}_s": plgpu.SMEM((stages, tile.parts(end), tile.width(end)), np.float32)
        for end in ("k", "v")
        if f"state_{end}" in factors
    }


def load_decay(refs: Refs, tile: Tile, place: Place, row: Any, stage: Any) -> None:
    """Starts copies of the factors of a row, `tile.decay_copies` of them."""
    for end, first in (("k", place.k), ("v", place.v)):
        if f"state_{end}_s" in refs:
            width = tile.width(end)
            for part in range(tile.parts(end)):
                window = refs[f"state_{end}"].at[place.batch, row, place.head, pl.ds(first + part * width, width)]
                plgpu.copy_gmem_to_smem(window, refs[f"state_{end}_s"].at[stage, part], refs["full"].at[stage])

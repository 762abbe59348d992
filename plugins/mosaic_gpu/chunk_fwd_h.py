"""`chunk_fwd_h` on Hopper: the state in registers, what a tile of tokens adds by `wgmma`.

    k, v [stage]  ──────────────────────────────────────────┐
    gates [stage] ──► registers: k * exp(after) ──► k_w ────┤ state = decay * state + k_w^T v
                                 v * exp(after) ──► v_w ────┘ (k_w is read transposed)

Gates of key channels, and those of a head, weigh the 64 keys of each warpgroup; gates of value channels weigh the
values. What no gate weighs is multiplied as it was loaded. Products of float32 operands, which the tensor cores
would round, are left to XLA; then the walk only adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.core.config import Config
from opmux.core.ops.chunk_gates import decayed
from opmux.core.ops.chunk_index import row_table
from opmux.core.ops.chunk_states import ChunkParams, cut_rows, outputs, sequences, without_tokens
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_gpu.capability import check_smem
from opmux.plugins.mosaic_gpu.chunk_fwd_h_config import TILE, ChunkFwdHConfig, Tile, on_tensor_cores, smem_bytes
from opmux.plugins.mosaic_gpu.chunk_fwd_h_decay import Refs, decay_scratch, decayed_state, load_decay, weights
from opmux.plugins.mosaic_gpu.chunk_fwd_h_sums import add_up
from opmux.plugins.mosaic_gpu.chunk_fwd_h_tiles import Layout, decay_of, factors_of, tiles_of
from opmux.plugins.mosaic_gpu.chunk_fwd_h_walk import Place, Walk
from opmux.plugins.mosaic_gpu.dot import dot
from opmux.plugins.mosaic_gpu.pallas import COMPUTE_WARPGROUPS, pad_for_simulator, swizzled

_TOKENS = ("k", "v", "after_k", "after_v")
_CHANNELWISE = (*_TOKENS, "base_k", "base_v")


def chunk_fwd_h(request: Request, operands: Operands, config: Config) -> Outputs:
    """The states between splits, and after each sequence.

    Args:
      request: a request of `chunk_fwd_h`.
      operands: its operands.
      config: a `ChunkFwdHConfig`.
    """
    trivial = without_tokens(request, operands)
    if trivial is not None:
        return trivial
    walk = walk_of(request, cast(ChunkFwdHConfig, config))
    dtype, last, h0 = outputs(request)["h"].dtype, "ht" in request.wanted, operands.get("h0")
    table = first_rows(request, operands)
    if on_tensor_cores(request):
        layout = Layout.of(request)
        arrays = tiles_of(request, operands, layout, walk.tile)
        source = Products(walk.tile, layout.steps, arrays["k"].dtype, tuple(arrays))
        h, ht = walk(source, {**source.padded(arrays), **table}, h0, dtype, last=last, name="chunk_fwd_h")
    else:
        rows = cut_rows(request, operands)
        decay = decay_of(request, rows)
        k = decayed(decayed(rows.arrays["k"], decay.k), None if decay.head is None else decay.head[..., None])
        v = decayed(rows.arrays["v"], decay.v)
        added = jnp.einsum("brshk,brshv->brhkv", k, v, precision=lax.Precision.HIGHEST)
        factors = {**factors_of(decay, walk.tile), **table}
        h, ht = add_up(walk, added, factors, h0, dtype, last=last, name="chunk_fwd_h_sums")
    return {"h": h, "ht": ht} if ht is not None else {"h": h}


def walk_of(request: Request, config: ChunkFwdHConfig, *, reverse: bool = False) -> Walk:
    """The walk along the rows of a request."""
    B, _, H, K = request["k"].shape
    check_smem(smem_bytes(request, config), block_v=config.block_v, num_stages=config.num_stages)
    tile = Tile(K, request["v"].shape[-1], config.block_v)
    packed = "cu_seqlens" in request
    return Walk(B, request.params.num_splits, H, sequences(request), tile, packed, config, reverse)


def first_rows(request: Request, operands: Operands) -> dict[str, jax.Array]:
    """`first_row` of packed sequences [N + 1], the last one the number of rows."""
    if "cu_seqlens" not in operands:
        return {}
    params: ChunkParams = request.params
    return {"first_row": row_table(operands["cu_seqlens"], params.split_size, params.num_splits).first_row}


@dataclass(frozen=True)
class Products:
    """A tile of keys and values in each step, and the decay that acts on them.

    Attributes:
      tile: channels of a block.
      steps: tiles of a row.
      dtype: of keys and values.
      names: of what is loaded, as `tiles_of` has it.
    """

    tile: Tile
    steps: int
    dtype: Any
    names: tuple[str, ...]

    @property
    def copies(self) -> int:
        """Copies of a step."""
        tokens = sum(self.tile.parts(name[-1]) for name in _CHANNELWISE if name in self.names)
        return tokens + ("head" in self.names) + self.tile.decay_copies(self.names)

    def padded(self, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays, in whole tiles where a simulator needs that."""
        wide = {"k": self.tile.k, "v": self.tile.v}
        return {
            name: pad_for_simulator(array, (1, TILE, 1, wide[name[-1]])) if name in _TOKENS else array
            for name, array in arrays.items()
        }

    def scratch(self, stages: int) -> dict[str, Any]:
        """Shared memory by name; `k_w` and `v_w` are each warpgroup's own."""
        tile = self.tile
        found: dict[str, Any] = {}
        for end in ("k", "v"):
            parts, width = tile.parts(end), tile.width(end)
            found[f"{end}_s"] = swizzled((stages, parts, TILE, width), self.dtype)
            if f"after_{end}" in self.names:
                found[f"after_{end}_s"] = swizzled((stages, parts, TILE, width), jnp.float32)
            if f"base_{end}" in self.names:
                found[f"base_{end}_s"] = plgpu.SMEM((stages, parts, width), jnp.float32)
            if f"state_{end}" in self.names:
                found[f"{end}_w"] = swizzled((COMPUTE_WARPGROUPS, TILE, width), self.dtype)
        if "head" in self.names:
            found["head_s"] = plgpu.SMEM((stages, TILE), jnp.float32)
        return {**found, **decay_scratch(tile, self.names, stages)}

    def load(self, refs: Refs, place: Place, row: Any, step: Any, stage: Any) -> None:
        """Starts the copies of a tile."""
        number = row * self.steps + step
        full = refs["full"].at[stage]
        tokens = pl.ds(number * TILE, TILE)
        for name in _CHANNELWISE:
            if name in self.names:
                end = name[-1]
                when, width = number if name.startswith("base") else tokens, self.tile.width(end)
                for part in range(self.tile.parts(end)):
                    own = pl.ds((place.k if end == "k" else place.v) + part * width, width)
                    window = refs[name].at[place.batch, when, place.head, own]
                    plgpu.copy_gmem_to_smem(window, refs[f"{name}_s"].at[stage, part], full)
        if "head" in self.names:
            plgpu.copy_gmem_to_smem(refs["head"].at[place.batch, place.head, number], refs["head_s"].at[stage], full)
        load_decay(refs, self.tile, place, row, stage)

    def take(self, refs: Refs, warpgroup: Any, stage: Any, state: jax.Array, first: bool) -> jax.Array:
        """Decays the state where a row begins, and adds the product of the tile."""
        if first:
            state = decayed_state(refs, self.tile, warpgroup, stage, state)
        operands: dict[str, Any] = {}
        for end in ("k", "v"):
            part, width = self.tile.part(end, warpgroup), self.tile.width(end)
            operands[end] = refs[f"{end}_s"].at[stage, part]
            weight = weights(refs, end, (stage, part), (TILE, width), pl.ds(0, width))
            if weight is not None:
                weighed = refs[f"{end}_w"].at[warpgroup]
                weighed[...] = (operands[end][...].astype(jnp.float32) * weight).astype(self.dtype)
                operands[end] = weighed
        if "state_k" in self.names or "state_v" in self.names:
            plgpu.commit_smem()  # for the product, and for the next copy to what was read
        return dot(operands["k"], operands["v"], state, transpose_a=True)

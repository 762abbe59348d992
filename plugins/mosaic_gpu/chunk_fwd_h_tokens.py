"""Cotangents of keys and values from those of the states, all tiles of tokens at once.

    d_after [row], k, v, gates ── TMA ──► slots [stage]
                                            │
      warpgroup 0:  v * exp(after) in registers,  times d_after^T  ──► * exp(after) ──► d_k ── TMA ──► HBM
      warpgroup 1:  k * exp(after) in registers,  times d_after    ──► * exp(after) ──► d_v ── TMA ──► HBM

A block takes one tile of one head after another, with all its channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.chunk_fwd_h_config import TILE, channels, whole_channels
from opmux.plugins.mosaic_gpu.chunk_fwd_h_decay import Refs, weights
from opmux.plugins.mosaic_gpu.dot import dot
from opmux.plugins.mosaic_gpu.pallas import (
    COMPUTE_WARPGROUPS,
    MEMORY_WARPGROUP,
    barriers,
    count,
    drain,
    for_each,
    launch,
    pad_for_simulator,
    pad_to,
    padded_for_simulator,
    swizzled,
)

_WIDEST = 128
"""Channels of one product: of its result, and of what it sums over."""


@dataclass(frozen=True)
class Tokens:
    """Tiles of tokens, each with the state of its row.

    Attributes:
      batch, rows, steps, heads: a row is `steps` tiles.
      sizes: channels by `k` and `v`, in whole lines of shared memory.
      dtype: of keys, values and states.
      names: of what is loaded, as `tiles_of` has it, and `d_after`.
      stages, ctas: tiles that can be on their way; most blocks.
    """

    batch: int
    rows: int
    steps: int
    heads: int
    sizes: Mapping[str, int]
    dtype: Any
    names: tuple[str, ...]
    stages: int
    ctas: int

    @property
    def items(self) -> int:
        """Tiles of all heads."""
        return self.batch * self.rows * self.steps * self.heads

    def place(self, item: Any) -> tuple[Any, Any, Any]:
        """Batch element, tile and head of an item."""
        item, head = lax.div(item, self.heads), lax.rem(item, self.heads)
        tiles = self.rows * self.steps
        return lax.div(item, tiles), lax.rem(item, tiles), head

    def scratch(self) -> dict[str, Any]:
        """Shared memory and barriers by name."""
        found: dict[str, Any] = {"d_after_s": swizzled((self.stages, self.sizes["k"], self.sizes["v"]), self.dtype)}
        for end, size in self.sizes.items():
            found[f"{end}_s"] = swizzled((self.stages, TILE, size), self.dtype)
            if f"after_{end}" in self.names:
                found[f"after_{end}_s"] = swizzled((self.stages, TILE, size), jnp.float32)
            if f"base_{end}" in self.names:
                found[f"base_{end}_s"] = plgpu.SMEM((self.stages, size), jnp.float32)
            found[f"d_{end}_s"] = swizzled((TILE, size), self.dtype)
        if "head" in self.names:
            found["head_s"] = plgpu.SMEM((self.stages, TILE), jnp.float32)
        return {
            **found,
            "full": barriers(self.stages, len(self.names)),
            "empty": barriers(self.stages, COMPUTE_WARPGROUPS),
        }

    def load(self, refs: Refs, item: Any, stage: Any) -> None:
        """Starts the copies of a tile, one for each name."""
        batch, number, head = self.place(item)
        first = _unknown_zero(item)
        for name in self.names:
            if name == "d_after":
                at = (batch, lax.div(number, self.steps), head, *(pl.ds(first, self.sizes[end]) for end in ("k", "v")))
            elif name == "head":
                at = (batch, head, number)
            else:
                own = pl.ds(first, self.sizes[name[-1]])
                at = (batch, number if name.startswith("base") else pl.ds(number * TILE, TILE), head, own)
            plgpu.copy_gmem_to_smem(refs[name].at[at], refs[f"{name}_s"].at[stage], refs["full"].at[stage])

    def cotangent(self, refs: Refs, end: str, stage: Any) -> None:
        """Writes the cotangent of the keys or the values of a tile to shared memory."""
        other = "v" if end == "k" else "k"
        for n, width in _pieces(self.sizes[end]):
            columns, total = pl.ds(n, width), None
            for c, depth in _pieces(self.sizes[other]):
                terms = pl.ds(c, depth)
                weighed = refs[f"{other}_s"][stage, :, terms].astype(jnp.float32)
                weight = weights(refs, other, (stage,), (TILE, depth), terms)
                weighed = (weighed if weight is None else weighed * weight).astype(self.dtype)
                at = (columns, terms) if end == "k" else (terms, columns)
                total = dot(weighed, refs["d_after_s"].at[(stage, *at)], total, transpose_b=end == "k")
            assert total is not None
            weight = weights(refs, end, (stage,), (TILE, width), columns)
            refs[f"d_{end}_s"][:, columns] = (total if weight is None else total * weight).astype(self.dtype)
        plgpu.commit_smem()  # for the store, and for the next copy to what was read

    def kernel(self, refs: Refs) -> None:
        """One block."""
        warpgroup, cta = lax.axis_index("wg"), lax.axis_index("cta")
        ctas = min(self.ctas, self.items)
        num_items = count(cta, self.items, ctas)
        full, empty = refs["full"], refs["empty"]

        @pl.when(warpgroup == MEMORY_WARPGROUP)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def load(number: Any) -> None:
                stage = lax.rem(number, self.stages)

                @pl.when(number >= self.stages)
                def _() -> None:
                    plgpu.barrier_wait(empty.at[stage])

                self.load(refs, cta + number * ctas, stage)

            for_each(0, num_items, load)
            drain(empty, num_items, self.stages)

        for owner, end in enumerate(("k", "v")):

            @pl.when(warpgroup == owner)
            def _(end: str = end) -> None:
                plgpu.set_max_registers(232, action="increase")

                def compute(number: Any) -> None:
                    stage = lax.rem(number, self.stages)
                    batch, tile, head = self.place(cta + number * ctas)
                    plgpu.barrier_wait(full.at[stage])
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last store was read
                    self.cotangent(refs, end, stage)
                    plgpu.barrier_arrive(empty.at[stage])
                    window = (batch, pl.ds(tile * TILE, TILE), head, pl.ds(_unknown_zero(tile), self.sizes[end]))
                    plgpu.copy_smem_to_gmem(refs[f"d_{end}_s"], refs[f"d_{end}"].at[window])

                for_each(0, num_items, compute)
                plgpu.wait_smem_to_gmem(0)


def _pieces(size: int) -> list[tuple[int, int]]:
    """First channel and number of channels of each product."""
    return [(first, min(_WIDEST, size - first)) for first in range(0, size, _WIDEST)]


def _unknown_zero(index: Any) -> Any:
    """The first channel, for a window of more channels than an array has: known starts are checked, but TMA clips."""
    return lax.rem(index, 1)


def token_cotangents(
    arrays: Mapping[str, jax.Array], d_after: jax.Array, rows: int, steps: int, stages: int, ctas: int
) -> tuple[jax.Array, jax.Array]:
    """The cotangents of `k` and `v` [B, tokens, H, channels], in their dtype.

    Args:
      arrays: what `tiles_of` gives.
      d_after: cotangent of the state after each row, [B, rows, H, K, V], in the dtype of `k`.
      rows: rows of a batch element.
      steps: tiles of a row.
      stages: tiles that can be on their way.
      ctas: most blocks that run.
    """
    B, _, H, K, V = d_after.shape
    sizes = {"k": whole_channels(K), "v": whole_channels(V)}
    inputs = {name: array for name, array in arrays.items() if not name.startswith("state")}
    inputs["d_after"] = pad_to(d_after, (*d_after.shape[:3], channels(K), channels(V)))
    tile = {"k": (1, TILE, 1, sizes["k"]), "v": (1, TILE, 1, sizes["v"]), "d_after": (1, 1, 1, *sizes.values())}
    tile |= {f"after_{end}": tile[end] for end in sizes}
    inputs = {name: pad_for_simulator(a, tile[name]) if name in tile else a for name, a in inputs.items()}
    outs = {
        f"d_{end}": jax.ShapeDtypeStruct(padded_for_simulator(arrays[end].shape, tile[end]), arrays[end].dtype)
        for end in sizes
    }
    tokens = Tokens(B, rows, steps, H, sizes, d_after.dtype, tuple(inputs), stages, ctas)
    scratch = tokens.scratch()
    names = (*inputs, *outs, *scratch)
    found = launch(
        lambda *refs: tokens.kernel(dict(zip(names, refs, strict=True))),
        tuple(outs.values()), name="chunk_fwd_h_tokens", grid=min(ctas, tokens.items),
        scratch=tuple(scratch.values()), specialized=True, approx_math=True,
    )(*inputs.values())  # fmt: skip
    T = arrays["k"].shape[1]
    return found[0][:, :T, :, :K], found[1][:, :T, :, :V]

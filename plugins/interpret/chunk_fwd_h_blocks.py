"""Blocks of tokens and states, shared by the forward and the backward kernel of `chunk_fwd_h`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from opmux.core.ops.chunk_index import RowTable, gather_rows, row_table
from opmux.core.ops.chunk_states import GATES, ChunkParams, sequences
from opmux.core.request import Operands, Request

# b batch, t tokens, s splits, h heads, k and v channels, n sequences, p one row for each block of the batch
_AXES = {
    "k": "bthk", "v": "bthv", "g": "bth", "g_gamma": "h", "gk": "bthk", "gv": "bthv", "h0": "nhkv",
    "lengths": "s", "sequence": "s", "h": "bshkv", "ht": "nhkv", "d_h": "bshkv", "d_ht": "nhkv", "d_gamma": "ph",
}  # fmt: skip


@dataclass(frozen=True)
class Blocks:
    """How a request is cut into grid steps (batch, heads, key channels, value channels, splits).

    Attributes:
      request: a request whose operands begin with those of the forward.
      bb, bs, bh, bk, bv: block sizes along batch, splits, heads and channels.
      reverse: steps along the splits run from the last one to the first.
    """

    request: Request
    bb: int
    bs: int
    bh: int
    bk: int
    bv: int
    reverse: bool = False

    @classmethod
    def of(cls, request: Request, config: Any, *, reverse: bool = False) -> Blocks:
        """Cuts the blocks of a config to the sizes of a request; channels without a block size stay whole."""
        B, _, H, K = request["k"].shape
        V = request["v"].shape[-1]
        return cls(
            request,
            min(config.block_batch, B),
            min(config.block_splits, request.params.num_splits),
            min(config.block_heads, H),
            min(getattr(config, "block_k", K), K),
            min(getattr(config, "block_v", V), V),
            reverse,
        )

    @cached_property
    def params(self) -> ChunkParams:
        """The static parameters."""
        return self.request.params

    @cached_property
    def packed(self) -> bool:
        """Whether the rows are those of packed sequences."""
        return "cu_seqlens" in self.request

    @cached_property
    def full(self) -> bool:
        """Whether every row of every block holds `span` tokens."""
        B, T = self.request["k"].shape[:2]
        whole = T % self.params.span == 0 and self.params.num_splits % self.bs == 0 and B % self.bb == 0
        return whole and not self.packed

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Steps along batch, heads, key channels, value channels and splits."""
        B, _, H, K = self.request["k"].shape
        sizes = (B, H, K, self.request["v"].shape[-1], self.params.num_splits)
        return tuple(map(pl.cdiv, sizes, (self.bb, self.bh, self.bk, self.bv, self.bs)))

    def spec(self, name: str) -> pl.BlockSpec:
        """The block of an array in a grid step."""
        states = sequences(self.request) if self.packed else self.bb
        sizes = {"b": self.bb, "t": self.bs * self.params.span, "s": self.bs, "h": self.bh, "k": self.bk,
                 "v": self.bv, "n": states, "p": 1}  # fmt: skip
        axes = _AXES[name]

        def index(b: Any, h: Any, i: Any, j: Any, step: Any) -> tuple[Any, ...]:
            s = self.split_block(step)
            at = {"b": b, "t": s, "s": s, "h": h, "k": i, "v": j, "n": b, "p": b}
            return tuple(at[axis] for axis in axes)

        return pl.BlockSpec(tuple(sizes[axis] for axis in axes), index)

    def split_block(self, step: Any) -> Any:
        """The block of splits of a step."""
        return self.grid[4] - 1 - step if self.reverse else step

    def lengths(self, refs: Mapping[str, Any], batch: Any, step: Any) -> jax.Array:
        """Valid tokens of the rows of a block, [bb, bs]; 0 past the last row and the last batch element."""
        B, T = self.request["k"].shape[:2]
        element = batch * self.bb + lax.broadcasted_iota(jnp.int32, (self.bb, self.bs), 0)
        split = self.split_block(step) * self.bs + lax.broadcasted_iota(jnp.int32, (self.bb, self.bs), 1)
        inside = (element < B) & (split < self.params.num_splits)
        if self.packed:
            return jnp.where(inside, refs["lengths"][...], 0)
        return jnp.where(inside, jnp.clip(T - split * self.params.span, 0, self.params.span), 0)

    def rows(self, refs: Mapping[str, Any], lengths: jax.Array, dtype: Any) -> dict[str, jax.Array]:
        """Keys, values and gates of a block as [bb, bs, span, bh, ...]; keys and values are 0 past a row's end."""
        span = self.params.span
        valid = lax.broadcasted_iota(jnp.int32, (self.bb, self.bs, span), 2) < lengths[..., None]
        rows: dict[str, jax.Array] = {}
        for name in ("k", "v", *GATES):
            if name == "g_gamma" and name in refs:
                rows[name] = refs[name][...]
            elif name in refs:
                block = refs[name][...]
                rows[name] = block.reshape(self.bb, self.bs, span, *block.shape[2:])
                if name in ("k", "v"):
                    kept = rows[name] if self.full else jnp.where(valid[..., None, None], rows[name], 0)
                    rows[name] = kept.astype(dtype)
        return rows

    def state_of(self, refs: Mapping[str, Any], split: Any) -> Any:
        """Index of the states that a split of the block belongs to."""
        return pl.ds(refs["sequence"][split], 1) if self.packed else slice(None)


def token_rows(request: Request, operands: Operands) -> tuple[dict[str, jax.Array], RowTable | None]:
    """Keys, values and gates whose rows lie `span` tokens apart, and the table of packed sequences."""
    inputs = {name: operands[name] for name in ("k", "v", *GATES) if name in operands}
    if "cu_seqlens" not in operands:
        return inputs, None
    params: ChunkParams = request.params
    table = row_table(operands["cu_seqlens"], params.split_size, params.num_splits)
    for name, array in inputs.items():
        if name != "g_gamma":
            rows = gather_rows(array, table, params.span)
            inputs[name] = rows.reshape(1, -1, *array.shape[2:])
    return {**inputs, "lengths": table.length, "sequence": table.sequence}, table

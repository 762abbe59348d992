"""Tokens and gates as the walk along time reads them: rows of whole tiles, and decay to the end of a row.

A row is what lies between two stored states. Where rows are whole tiles, keys and values stay where they are, and so
do cumulative gates that restart at the edge of a tile: `after = base - gate`. Otherwise the rows are cut first, which
copies them: those of packed sequences, because a swizzled tile must begin at a multiple of eight tokens, and those of
short or odd chunks. Gates per token are summed up here, from the end of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core.ops.chunk_gates import Exponents, exponents
from opmux.core.ops.chunk_states import ChunkParams, Rows, cut_rows
from opmux.core.request import Operands, Request
from opmux.plugins.mosaic_gpu.chunk_fwd_h_config import TILE, Tile, channels
from opmux.plugins.mosaic_gpu.pallas import pad_to

ON_HEADS = ("g", "g_gamma")
"""Gates of a head, which decay keys and values alike."""


@dataclass(frozen=True)
class Layout:
    """How the tokens of a request are cut.

    Attributes:
      steps: tiles of a row.
      in_place: keys and values are read where they are.
      direct: gates of channels are read where they are.
    """

    steps: int
    in_place: bool
    direct: bool

    @classmethod
    def of(cls, request: Request) -> Layout:
        """The layout of a request."""
        params: ChunkParams = request.params
        T = request["k"].shape[1]
        in_place = "cu_seqlens" not in request and (params.num_splits == 1 or params.span % TILE == 0)
        whole_chunks = params.chunk % TILE == 0 or params.chunk >= T
        return cls(-(-params.span // TILE), in_place, in_place and not params.raw and whole_chunks)


class Decay(NamedTuple):
    """Decay of rows of tokens, absent where no gate acts.

    Attributes:
      k, v: logs of the weights of tokens to the end of their row, [B, R, S, H, K] and [B, R, S, H, V].
      head: the same of the gates of a head, [B, R, S, H].
      state_k, state_v: factors of the state over a row, [B, R, H, K] and [B, R, H, V]; gates of a head are in the
        first.
    """

    k: jax.Array | None
    v: jax.Array | None
    head: jax.Array | None
    state_k: jax.Array | None
    state_v: jax.Array | None


def decay_of(request: Request, rows: Rows) -> Decay:
    """The decay that the gates of rows make."""
    params: ChunkParams = request.params

    def exponents_of(*names: str) -> Exponents:
        given = {name: rows.arrays[name] for name in names if name in rows.arrays}
        return exponents(given, rows.lengths, params.span, params.chunk, params.raw, rows.full)

    k, v, head = exponents_of("gk"), exponents_of("gv"), exponents_of(*ON_HEADS)
    over_head = None if head.state_v is None else head.state_v[..., 0, :]
    over_k = None if k.state_k is None else k.state_k[..., 0]
    sums = [each for each in (over_k, over_head) if each is not None]
    return Decay(
        k=k.k,
        v=v.v,
        head=None if head.v is None else head.v[..., 0],
        state_k=jnp.exp(sum(sums[1:], sums[0])) if sums else None,
        state_v=None if v.state_v is None else jnp.exp(v.state_v[..., 0, :]),
    )


def factors_of(decay: Decay, tile: Tile) -> dict[str, jax.Array]:
    """`state_k` and `state_v`, as far as they act, [B, R, H, channels of whole blocks]; 1 in those that pad."""
    found: dict[str, jax.Array] = {}
    for name, factor, size, whole in (
        ("state_k", decay.state_k, tile.size_k, tile.whole("k")),
        ("state_v", decay.state_v, tile.size_v, tile.whole("v")),
    ):
        if factor is not None:
            factor = jnp.broadcast_to(factor, (*factor.shape[:-1], size))
            found[name] = jnp.pad(factor, ((0, 0), (0, 0), (0, 0), (0, whole - size)), constant_values=1)
    return found


def tiles_of(request: Request, operands: Operands, layout: Layout, tile: Tile) -> dict[str, jax.Array]:
    """What the walk loads, by name.

    Returns:
      `k`, `v` [B, tokens, H, channels], and of what acts on them:
      `after_k`, `after_v` [B, tokens, H, channels], logs of weights; where `base_k`, `base_v` [B, tiles, H, channels]
      are there, cumulative gates instead, which are to be subtracted from those;
      `head` [B, H, tiles, TILE], logs of weights of keys;
      `state_k`, `state_v`, as `factors_of` has them.
    """
    rows = cut_rows(request, operands)
    decay = decay_of(request, rows)
    length = layout.steps * TILE

    def flat(array: jax.Array) -> jax.Array:
        """Rows [B, R, S, H, D] as whole tiles, one after another: [B, tokens, H, D]."""
        padded = jnp.pad(array, ((0, 0), (0, 0), (0, length - array.shape[2]), (0, 0), (0, 0)))
        return padded.reshape(array.shape[0], -1, *array.shape[3:])

    found = {name: operands[name] if layout.in_place else flat(rows.arrays[name]) for name in ("k", "v")}
    bases: dict[str, jax.Array] = {}
    for gate, end, after in (("gk", "k", decay.k), ("gv", "v", decay.v)):
        if after is not None and layout.direct:
            found[f"after_{end}"] = operands[gate]
            bases[f"base_{end}"] = _bases(operands[gate], request.params, layout, tile.whole(end))
        elif after is not None:
            found[f"after_{end}"] = flat(after)
    found = {name: _addressable(array) for name, array in found.items()} | bases
    if decay.head is not None:
        head = jnp.moveaxis(flat(decay.head[..., None])[..., 0], 2, 1)
        found["head"] = head.reshape(*head.shape[:2], -1, TILE)
    return found | factors_of(decay, tile)


def _bases(gate: jax.Array, params: ChunkParams, layout: Layout, whole: int) -> jax.Array:
    """What a cumulative gate [B, T, H, D] is subtracted from in each tile: its sum from there to the row's end."""
    B, T = gate.shape[:2]
    chunks = -(-params.span // params.chunk)
    ends = np.minimum(np.arange(1, -(-T // params.chunk) + 1) * params.chunk, T) - 1
    sums = gate[:, ends]
    sums = jnp.pad(sums, ((0, 0), (0, -sums.shape[1] % chunks), (0, 0), (0, whole - gate.shape[3])))
    sums = sums.reshape(B, -1, chunks, *sums.shape[2:])
    sums = jnp.flip(jnp.cumsum(jnp.flip(sums, 2), 2), 2)
    return jnp.repeat(sums.reshape(B, -1, *sums.shape[3:]), layout.steps // chunks, axis=1)


def _addressable(array: jax.Array) -> jax.Array:
    """Tokens [B, T, H, D], padded to what TMA can cut into tiles."""
    B, T, H, D = array.shape
    return pad_to(array, (B, T + -T % 8, H, channels(D)))

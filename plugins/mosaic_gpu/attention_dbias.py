"""The cotangent of the bias, on a Hopper GPU: that of the scores, summed over what the bias does not vary along.

Each of two warpgroups owns 64 rows of a tile of the bias, and adds up in registers, always in the same order, the
blocks of scores of all batch elements and heads, queries and keys that share it:

    q, d_out ── TMA ──► q_s, d_s [stage] ─┐ wgmma
    k, v ── TMA ──► k_s, v_s [stage] ─────┴──► weights, d_weights ──► d_scores ──► acc ──► d_bias
         full ▲ │ empty

Along an axis of size one a tile's columns or rows stay apart, and are added up by XLA.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.attention_blocks import Problem, rows_of
from opmux.plugins.mosaic_gpu.attention_config import ROWS, TILE, AttentionVjpConfig
from opmux.plugins.mosaic_gpu.attention_scores import Scores
from opmux.plugins.mosaic_gpu.attention_stream import Stream, finish, over_tiles
from opmux.plugins.mosaic_gpu.attention_tiles import divide, stream
from opmux.plugins.mosaic_gpu.attention_view import View
from opmux.plugins.mosaic_gpu.capability import SMEM_BYTES, check_smem
from opmux.plugins.mosaic_gpu.dot import dot
from opmux.plugins.mosaic_gpu.pallas import COMPUTE_WARPGROUPS, barriers, launch, load_tile, swizzled


@dataclass(frozen=True)
class Sums:
    """Which blocks of scores are added up for which tile of the bias.

    Attributes:
      own: tiles along batch, heads, queries and keys.
      shared: blocks of scores along each of them that one tile adds up.
    """

    own: tuple[int, int, int, int]
    shared: tuple[int, int, int, int]

    @classmethod
    def of(cls, problem: Problem, block: int) -> Sums:
        """The sums of a problem that has a bias."""
        assert problem.bias is not None
        whole = (problem.B, problem.N, pl.cdiv(problem.T, TILE), pl.cdiv(problem.S, block))
        varies = tuple(size > 1 for size in problem.bias)
        own = tuple(size if vary else 1 for size, vary in zip(whole, varies, strict=True))
        shared = tuple(1 if vary else size for size, vary in zip(whole, varies, strict=True))
        return cls(own, shared)  # pyright: ignore[reportArgumentType]

    @property
    def tiles(self) -> int:
        """All tiles."""
        return math.prod(self.own)

    @property
    def steps(self) -> int:
        """Blocks of scores of one tile."""
        return math.prod(self.shared)

    def place(self, tile: Any) -> list[Any]:
        """Indices of a tile."""
        return _unravel(tile, self.own)

    def block(self, tile: Any, step: Any) -> tuple[Any, Any, Any, Any]:
        """Batch element, head, tile of queries and block of keys of a step of a tile."""
        b, n, t, s = (
            one if count > 1 else other
            for one, other, count in zip(self.place(tile), _unravel(step, self.shared), self.own, strict=True)
        )
        return b, n, t, s


def _unravel(index: Any, shape: tuple[int, ...]) -> list[Any]:
    found: list[Any] = []
    for size in reversed(shape):
        index, one = divide(index, size)
        found.append(one)
    return found[::-1]


def dbias(
    problem: Problem, config: AttentionVjpConfig, query: jax.Array, key: jax.Array, value: jax.Array,
    d_out: jax.Array, rows: jax.Array, masks: Mapping[str, jax.Array],
) -> jax.Array:  # fmt: skip
    """The cotangent of the bias.

    Args:
      problem: sizes.
      config: blocks.
      query: [B, T, N, H]; key: [B, S, K, H]; value: [B, S, K, Hv]; d_out: [B, T, N, Hv]; all finite where hidden.
      rows: [B, N, 2, T], T padded to tiles: log-sum-exps in base 2, and deltas.
      masks: as `attention_view.masks` makes them.

    Returns:
      Float32, of the shape of the bias.
    """
    assert problem.bias is not None
    block, H, Hv, dtype = config.block_kv, problem.H, problem.Hv, problem.dtype
    sums = Sums.of(problem, block)
    stage = dtype.itemsize * (H + Hv) * (TILE + block)
    check_smem(stage, block_kv=block, head=H, value_head=Hv)
    stages = min(3, (SMEM_BYTES - 1024) // stage)
    ctas = min(config.num_ctas or sums.tiles, sums.tiles)
    shape = (*sums.own[:2], sums.own[2] * TILE, sums.own[3] * block)
    out = launch(
        functools.partial(
            _kernel, problem=problem, sums=sums, block=block, stages=stages, ctas=ctas, names=tuple(masks)
        ),
        jax.ShapeDtypeStruct(shape, jnp.float32),
        name="attention_dbias",
        grid=ctas,
        warpgroups=COMPUTE_WARPGROUPS,
        approx_math=True,
        scratch=(
            *(swizzled((stages, COMPUTE_WARPGROUPS, ROWS, size), dtype) for size in (H, Hv)),
            *(swizzled((stages, block, size), dtype) for size in (H, Hv)),
            barriers(stages, 2 + 2 * COMPUTE_WARPGROUPS),
            barriers(stages, COMPUTE_WARPGROUPS),
        ),
    )(stream(query, TILE), stream(key, block), stream(value, block), stream(d_out, TILE), rows, *masks.values())
    _, _, t, s = problem.bias
    out = out[:, :, : problem.T] if t > 1 else out.sum(2, keepdims=True)
    return out[..., : problem.S] if s > 1 else out.sum(3, keepdims=True)


def _kernel(
    q_g: Any, k_g: Any, v_g: Any, d_g: Any, rows_g: Any, *refs: Any, problem: Problem, sums: Sums, block: int,
    stages: int, ctas: int, names: tuple[str, ...],
) -> None:  # fmt: skip
    masks, refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    o_g, q_s, d_s, k_s, v_s, full, empty = refs
    wg, scores, shape = lax.axis_index("wg"), Scores(problem), (ROWS, block)

    def tile(number: Any, done: Any) -> int:
        def copy(step: Any, slot: Any) -> None:
            b, head, *places = sums.block(number, step)
            t, s = map(jnp.int32, places)  # only a traced window may reach past the end, where TMA ends
            for source, target in ((q_g, q_s), (d_g, d_s)):
                for owner in range(COMPUTE_WARPGROUPS):
                    queries = pl.ds(t * TILE + owner * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(source.at[b, queries, head], target.at[slot, owner], full.at[slot])
            kv_head = lax.div(jnp.int32(head), problem.G)
            for source, target in ((k_g, k_s), (v_g, v_s)):
                keys = source.at[b, pl.ds(s * block, block), kv_head]
                plgpu.copy_gmem_to_smem(keys, target.at[slot], full.at[slot])

        blocks = Stream(copy, sums.steps, done, stages, full, empty)
        blocks.start()

        def add(step: Any, acc: jax.Array) -> jax.Array:
            b, head, t, s = sums.block(number, step)
            row, column = t * TILE + wg * ROWS, s * block
            view = View(problem, masks, b, head)
            slot = blocks.take(step)
            bias = view.bias(row, column, shape)
            values, _ = scores.of(dot(q_s.at[slot, wg], k_s.at[slot], transpose_b=True), bias)
            lse, delta = (load_tile(rows_g, (b, head, which, pl.ds(row, ROWS))) for which in range(2))
            weights = scores.weights(values, rows_of(lse, shape))
            d_weights = dot(d_s.at[slot, wg], v_s.at[slot], transpose_b=True)
            blocks.release(slot)
            d_scores = weights * (d_weights - rows_of(delta, shape))
            return acc + jnp.where(view.seen(row, column, shape, bias), d_scores, 0.0)

        total = lax.fori_loop(0, sums.steps, add, jnp.zeros(shape, jnp.float32))
        b, n, t, s = sums.place(number)
        o_g[b, n, pl.ds(t * TILE + wg * ROWS, ROWS), pl.ds(s * block, block)] = total
        return sums.steps

    finish(empty, over_tiles(sums.tiles, ctas, tile), stages)

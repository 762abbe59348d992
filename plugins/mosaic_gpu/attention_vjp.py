"""The backward of `attention` on a GPU of compute capability 9.0: what is done around its kernels.

    weights   = exp(scores - lse)
    d_scores  = weights * (d_out @ value^T - delta),   delta = sum(d_out * out) - d_lse, for each row

NaN and infinite inputs are cleared: a row that sees one has NaN in `lse` or `out`, which makes its own cotangents and
those of every key that it sees NaN, and no others. An empty row has no weights and no cotangents.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp

from opmux.core.config import Config
from opmux.core.ops.attention import without_scores
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_gpu.attention_blocks import Problem
from opmux.plugins.mosaic_gpu.attention_config import TILE, AttentionVjpConfig
from opmux.plugins.mosaic_gpu.attention_dbias import dbias
from opmux.plugins.mosaic_gpu.attention_dkv import dkv
from opmux.plugins.mosaic_gpu.attention_dq import dq
from opmux.plugins.mosaic_gpu.attention_scores import Scores
from opmux.plugins.mosaic_gpu.attention_tiles import KeyTiles, QueryTiles
from opmux.plugins.mosaic_gpu.attention_view import masks
from opmux.plugins.mosaic_gpu.pallas import pad_axis

_MOST_SUMS = 256
"""Columns of float32 sums that fit in registers beside two blocks of scores."""


def attention_vjp(request: Request, operands: Operands, config: Config) -> Outputs:
    """Cotangents of the wanted operands, in O(T + S) memory; the same ones in every run.

    Args:
      request: a request of `attention_vjp`.
      operands: those of the forward, its outputs, and their cotangents.
      config: an `AttentionVjpConfig`.
    """
    config = cast(AttentionVjpConfig, config)
    trivial = without_scores(request)
    if trivial is not None:
        return trivial
    problem = Problem.of(request)

    def load(name: str) -> jax.Array:
        array = operands[name]
        return jnp.where(jnp.isfinite(array), array, 0) if problem.hides else array

    given = (load("query"), load("key"), load("value"), *_rows(problem, operands))
    results: Outputs = {}
    if "query" in request.wanted:
        found = masks(problem, request, operands, queries=TILE, keys=config.block_kv)
        results["query"] = dq(QueryTiles.of(problem, config.num_ctas), config, *given, found)
    if "bias" in request.wanted:
        found = masks(problem, request, operands, queries=TILE, keys=config.block_kv)
        results["bias"] = dbias(problem, config, *given, found).astype(request["bias"].dtype)
    sums = [name for name in ("key", "value") if name in request.wanted]
    together = problem.H + problem.Hv <= _MOST_SUMS
    for wanted in ([sums] if together else [[name] for name in sums]) if sums else []:
        found = masks(problem, request, operands, queries=config.block_q, keys=TILE, query_axis=1)
        results |= dkv(KeyTiles.of(problem, config.num_ctas), config, wanted, *given, found)
    return results


def _rows(problem: Problem, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """`d_out` [B, T, N, Hv], and [B, N, 2, T] of log-sum-exps and deltas, T padded to whole tiles.

    Log-sum-exps are in the unit of `Scores`. Of a row that does not exist, or sees nothing, they are +inf, so that its
    weights are 0.
    """
    lse, out = operands["lse"].astype(jnp.float32), operands["out"]
    empty = lse == -jnp.inf
    d_out = operands["d_out"].astype(problem.dtype) if "d_out" in operands else jnp.zeros_like(out)
    d_out = jnp.where(empty[..., None], 0, d_out)
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)
    if "d_lse" in operands:
        delta = delta - operands["d_lse"].astype(jnp.float32)
    lse = jnp.where(empty, jnp.inf, lse * Scores(problem).unit).transpose(0, 2, 1)
    delta = jnp.where(empty, 0, delta).transpose(0, 2, 1)
    return d_out, jnp.stack([pad_axis(lse, 2, TILE, jnp.inf), pad_axis(delta, 2, TILE)], axis=2)

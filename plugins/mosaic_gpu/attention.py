"""`attention` on a GPU of compute capability 9.0: what is done around the kernel of `attention_forward`.

Weights of hidden keys are 0, but 0 times NaN is NaN: where some queries may see a value and others may not, a NaN or
infinity in it must reach the former alone. No value has one as a rule, and then the kernel runs on the values as they
are. Otherwise it runs on values without them, and once more to find who sees one: with equal scores, on 1 where a
value has one and 0 elsewhere, the output is positive for exactly those.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from opmux.core.config import Config
from opmux.core.ops.attention import without_scores
from opmux.core.request import Operands, Outputs, Request
from opmux.plugins.mosaic_gpu.attention_blocks import Problem
from opmux.plugins.mosaic_gpu.attention_config import TILE, AttentionConfig
from opmux.plugins.mosaic_gpu.attention_forward import forward
from opmux.plugins.mosaic_gpu.attention_view import masks


def attention(request: Request, operands: Operands, config: Config) -> Outputs:
    """`out` and `lse` of a canonical attention, in O(T + S) memory.

    Args:
      request: a request of `attention`.
      operands: `query`, `key` and `value`, and what masks them.
      config: an `AttentionConfig`.
    """
    config = cast(AttentionConfig, config)
    trivial = without_scores(request)
    if trivial is not None:
        return trivial
    problem, query = Problem.of(request), operands["query"]
    # The kernel takes a maximum before it scales, and masks with -inf, which must not meet a factor of 0.
    scale = problem.params.scale
    if scale <= 0:
        query = query * jnp.asarray(-1 if scale else 0, query.dtype)
        problem = dataclasses.replace(problem, params=dataclasses.replace(problem.params, scale=-scale or 1.0))
    found = masks(problem, request, operands, queries=TILE, keys=config.block_kv)

    def run(query: jax.Array, key: jax.Array, value: jax.Array, masks: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        out, lse = forward(problem, config, query, key, value, masks, with_lse="lse" in request.wanted)
        return (out,) if lse is None else (out, lse.transpose(0, 2, 1))

    def run_with_bad_values(
        query: jax.Array, key: jax.Array, value: jax.Array, masks: dict[str, jax.Array]
    ) -> tuple[jax.Array, ...]:
        bad = ~jnp.isfinite(value)
        out, *lse = run(query, key, jnp.where(bad, 0, value), masks)
        if "bias" in masks:
            masks = {**masks, "bias": jnp.where(masks["bias"] == -jnp.inf, -jnp.inf, 0).astype(masks["bias"].dtype)}
        hit, *_ = run(jnp.zeros_like(query), jnp.zeros_like(key), bad.astype(value.dtype), masks)
        return (jnp.where(hit > 0, jnp.nan, out), *lse)

    given = (query, operands["key"], operands["value"], found)
    clean = jnp.isfinite(given[2]).all()
    results = lax.cond(clean, run, run_with_bad_values, *given) if problem.hides else run(*given)
    return dict(zip(("out", "lse"), results, strict=False))

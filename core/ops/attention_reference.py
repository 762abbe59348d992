"""The executable specification of `attention`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.ops.attention_mask import AttentionParams, visible
from opmux.core.request import Operands, Outputs, Request


def accumulator(dtype: Any) -> np.dtype[Any]:
    """Float64 for float64 inputs, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def reference(request: Request, operands: Operands) -> Outputs:
    """The specification: every score at once, O(T S) memory."""
    params: AttentionParams = request.params
    query, key, value = operands["query"], operands["key"], operands["value"]
    acc = accumulator(query.dtype)
    B, T, N, H = query.shape
    S, K, Hv = value.shape[1:]
    grouped = query.reshape(B, T, K, N // K, H)

    # NaN and Inf must reach exactly the rows that see them. A product would spread them (0 * NaN), so
    # products read cleaned operands, and a non-finite query or key poisons its scores instead.
    q, q_bad = _clean(grouped)
    k, k_bad = _clean(key)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, preferred_element_type=acc, precision=lax.Precision.HIGHEST)
    scores = scores.reshape(B, N, T, S) * params.scale
    if params.soft_cap is not None:
        scores = params.soft_cap * jnp.tanh(scores / params.soft_cap)
    q_bad = q_bad.any(-1).reshape(B, T, N).transpose(0, 2, 1)[..., None]
    k_bad = jnp.repeat(k_bad.any(-1).transpose(0, 2, 1), N // K, axis=1)[:, :, None]
    seen = visible(request, operands)
    if "bias" in operands:
        bias = operands["bias"].astype(acc)
        seen = seen & (bias != -jnp.inf)
        scores = scores + jnp.where(seen, bias, 0)
    scores = jnp.where(q_bad | k_bad, jnp.nan, scores)

    seen = jnp.broadcast_to(seen, scores.shape)
    any_seen = seen.any(-1, keepdims=True)
    top = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, where=seen, initial=-jnp.inf))
    top = jnp.where(any_seen, top, 0)
    weights = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    lse = jnp.where(any_seen, jnp.log(jnp.where(any_seen, total, 1)) + top, -jnp.inf)[..., 0]

    v, v_bad = _clean(value)
    # 0 for a key that a row does not see, even if the row is NaN: its own gradient must not be.
    # Rounded like any attention in 16 bits: the weights enter the second product in the inputs' dtype.
    p = jnp.where(seen, weights / jnp.where(any_seen, total, 1), 0).reshape(B, K, N // K, T, S).astype(value.dtype)
    out = jnp.einsum("bkgts,bskv->btkgv", p, v, preferred_element_type=acc, precision=lax.Precision.HIGHEST)

    def poison(out: jax.Array) -> jax.Array:
        rows = seen.reshape(B, K, N // K, T, S).astype(jnp.float32)
        hit = jnp.einsum("bkgts,bskv->btkgv", rows, v_bad.astype(jnp.float32)) > 0
        return out + jnp.where(hit, jnp.nan, 0).astype(acc)

    if S:
        out = lax.cond(v_bad.any(), poison, lambda out: out, out)
    return {"out": out.reshape(B, T, N, Hv).astype(query.dtype), "lse": lse.transpose(0, 2, 1)}


def _clean(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The array with 0 for NaN and Inf, and where those were."""
    bad = ~jnp.isfinite(array)
    return jnp.where(bad, 0, array), bad

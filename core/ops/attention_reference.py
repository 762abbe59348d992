"""The executable specification of `attention`.

    query, key ─► scores ─► scale, cap, bias, mask ─► softmax ─► weighted sums of the values
                  (T S)                               (its log-sum-exp is `lse`)

NaN and Inf reach exactly the rows that see them, and in the derivative the keys that such rows see. Products over keys
or rows would spread them, since 0 * NaN is NaN: where queries are kept from keys, what may meet a 0 is cleaned, and
the row that saw it gets its NaN another way. Both steps with products have rules of their own for that, which JAX
transposes into the backward of flash attention with the weights kept: `d_scores = weights * (d_out value^T - delta)`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from opmux.core.ops.attention_mask import AttentionParams, always_sees, hides, visible
from opmux.core.request import Operands, Outputs, Request


def accumulator(dtype: Any) -> np.dtype[Any]:
    """Float64 for float64 inputs, else float32."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def reference(request: Request, operands: Operands) -> Outputs:
    """The specification: every score at once, O(T S) memory."""
    params: AttentionParams = request.params
    query, key, value = operands["query"], operands["key"], operands["value"]
    seen = _seen(request, operands)
    scores = _scores(query, key, seen is not None) * params.scale
    if params.soft_cap is not None:
        # The slope of tanh at NaN is NaN, for a cotangent of 0 too.
        scores = scores if seen is None else jnp.where(seen, scores, 0)
        scores = params.soft_cap * jnp.tanh(scores / params.soft_cap)
    if seen is not None:
        if "bias" in operands:
            scores = scores + jnp.where(seen, operands["bias"].astype(scores.dtype), 0)
        scores = jnp.where(seen, scores, -jnp.inf)
    precise = "bias" in operands and operands["bias"].dtype != value.dtype
    out, lse, _ = _attend(scores, value, seen, always_sees(request), precise)
    return {"out": out.transpose(0, 2, 1, 3), "lse": lse[..., 0].transpose(0, 2, 1)}


def _seen(request: Request, operands: Operands) -> jax.Array | None:
    """Which query sees which key, broadcasts to [B, N, T, S]; None if all see all."""
    if not hides(request):
        return None
    seen = visible(request, operands)
    return seen & (operands["bias"] != -jnp.inf) if "bias" in operands else seen


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def _scores(query: jax.Array, key: jax.Array, hidden: bool) -> jax.Array:
    """Products of queries and keys, [B, N, T, S], in the accumulator's dtype; `hidden`: some count for nothing."""
    return _pair(query, key, accumulator(query.dtype))


@partial(_scores.defjvp, symbolic_zeros=True)
def _(hidden: bool, primals: Any, tangents: Any) -> Any:
    # A query or key with NaN has made NaN of the scores themselves.
    query, key = (_cleaned(array) if hidden else array for array in primals)
    scores = _scores(*primals, hidden)
    moved = _sum(
        (tangents[0], lambda tangent: _pair(tangent, key, query.dtype, grouped=True)),
        (tangents[1], lambda tangent: _pair(query, tangent, query.dtype, grouped=True)),
    )
    return scores, moved.astype(scores.dtype)


@partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _attend(
    scores: jax.Array, value: jax.Array, seen: jax.Array | None, always: bool, precise: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output [B, N, T, Hv], log-sum-exp [B, N, T, 1] and weights [B, N, T, S] of scores, -inf where not `seen`.

    `always`: no row is empty. `precise`: cotangents of scores go to a bias of a wider dtype than the values', so
    that the product which makes them must not be rounded to that.
    """
    # On CPUs 16 bits are faster divided by their total before the product.
    early = value.dtype.itemsize == 2
    weights, total, lse = _softmax(scores, always)
    out = _columns(weights / total if early else weights, value)
    if seen is not None:

        def poisoned(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            # Made anew: a loop makes XLA write what it is given, and these scores it has written already.
            weights, total, _ = _softmax(scores, always)
            hit = _columns(jnp.broadcast_to(seen, weights.shape), (~jnp.isfinite(value)).astype(value.dtype)) > 0
            found = _columns(weights / total if early else weights, _cleaned(value))
            return carry[0] & False, jnp.where(hit, jnp.nan, found)

        # NaN in a value has spread to all rows, so a look at the first is enough. A loop that runs once at most leaves
        # its carry in place, where `lax.cond` would copy it.
        _, out = lax.while_loop(lambda carry: carry[0], poisoned, (~_finite(out[..., :1]), out))
    out = (out if early else out / total.swapaxes(2, 3)).swapaxes(2, 3)
    weights = weights / total
    return out, lse, weights if seen is None else jnp.where(seen, weights, 0)  # all of a row is NaN if one score is


@partial(_attend.defjvp, symbolic_zeros=True)
def _(always: bool, precise: bool, primals: Any, tangents: Any) -> Any:
    _, value, seen = primals
    out, lse, weights = found = _attend(*primals, always, precise)
    if seen is not None:
        value = lax.optimization_barrier(_cleaned(value))  # a row that saw NaN has it in `out`

    def of_scores(tangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        weighted = weights * tangent
        d_lse = weighted.sum(-1, keepdims=True)
        factor = value.astype(weighted.dtype) if precise else value
        mixed = _columns(weighted, factor, grouped=True).swapaxes(2, 3).astype(out.dtype)
        return mixed - (d_lse * out).astype(out.dtype), d_lse, weights * (tangent - d_lse)

    def of_value(tangent: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _columns(weights, tangent, grouped=True).swapaxes(2, 3), jnp.zeros_like(lse), jnp.zeros_like(weights)

    return found, _sum((tangents[0], of_scores), (tangents[1], of_value))


def _softmax(scores: jax.Array, always: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Weights before the division by their total, the total, and the log-sum-exp; 0, 1 and -inf of an empty row."""
    top = scores.max(-1, keepdims=True, initial=-jnp.inf)
    empty = False if always else top == -jnp.inf
    top = _unless(empty, top, 0)
    weights = jnp.exp(scores - top)
    total = _unless(empty, weights.sum(-1, keepdims=True), 1)
    return weights, total, _unless(empty, jnp.log(total) + top, -jnp.inf)


def _pair(query: jax.Array, key: jax.Array, dtype: Any, grouped: bool = False) -> jax.Array:
    """Products of [B, T, N, H] and [B, S, K, H], [B, N, T, S]."""
    B, T, N, H = query.shape
    S, K = key.shape[1:3]
    einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=dtype)
    if N == K and not grouped:
        return einsum("btnh,bsnh->bnts", query, key)
    return einsum("btkgh,bskh->bkgts", query.reshape(B, T, K, N // K, H), key).reshape(B, N, T, S)


def _columns(weights: jax.Array, value: jax.Array, grouped: bool = False) -> jax.Array:
    """Sums of the values [B, S, K, Hv] by weights [B, N, T, S], [B, N, Hv, T]: as products come, not transposed yet.

    Rounded like any attention in 16 bits: the weights enter the product in the values' dtype. `grouped`: written as
    with several heads a key head, which for derivatives is faster for one too.
    """
    B, N, T, S = weights.shape
    K, Hv = value.shape[2:]
    weights = weights.astype(value.dtype)
    einsum = partial(jnp.einsum, precision=lax.Precision.HIGHEST)
    if N == K and not grouped:
        return einsum("bnts,bsnv->bnvt", weights, value)
    return einsum("bkgts,bskv->bkgvt", weights.reshape(B, K, N // K, T, S), value).reshape(B, N, Hv, T)


def _unless(condition: Any, array: jax.Array, other: float) -> jax.Array:
    return array if condition is False else jnp.where(condition, other, array)


def _cleaned(array: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(array), array, 0)


def _sum(*terms: tuple[Any, Callable[[jax.Array], Any]]) -> Any:
    """The tangent made by those of the factors that have one."""
    moved = [term(tangent) for tangent, term in terms if not isinstance(tangent, SymbolicZero)]
    return jax.tree.map(lambda *parts: sum(parts[1:], parts[0]), *moved)


@jax.custom_batching.custom_vmap
def _finite(array: jax.Array) -> jax.Array:
    """Whether no entry is NaN or Inf. CPUs add twice as fast as they test and combine the answers."""
    return (array * 0).sum() == 0


@_finite.def_vmap
def _(size: int, batched: list[bool], array: jax.Array) -> tuple[jax.Array, bool]:
    # One answer for the whole batch: to choose for each element means to compute both forms.
    return _finite(array), False

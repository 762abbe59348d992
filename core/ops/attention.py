"""`attention`: scaled dot-product attention in BTNH layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from opmux.core.check import Checker
from opmux.core.op import Call, Cost, Op, make_request
from opmux.core.ops.attention_mask import AttentionParams
from opmux.core.ops.attention_reference import accumulator, reference
from opmux.core.request import ArraySpec, Outputs, Request

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int


def canonicalize(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "#B #N #T #S"] | None = None,
    mask: Bool[Array, "#B #N #T #S"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    causal_alignment: str = "top_left",
    q_segment_ids: Int[Array, "*B T"] | None = None,
    kv_segment_ids: Int[Array, "*B S"] | None = None,
    return_residual: bool = False,
) -> Any:
    """Scaled dot-product attention, `softmax(cap(scale * q kT) + bias, where=mask) v`.

    A drop-in for `jax.nn.dot_product_attention`. Softmax and accumulation are float32 (float64 for
    float64 inputs). A query row that may see no key gives 0, a log-sum-exp of -inf and zero gradients.
    Masked and padded positions contribute nothing, whatever they hold. All of `mask`, `is_causal`,
    `local_window_size`, lengths and segment ids intersect.

    Args:
      query: queries, [B, T, N, H]; [T, N, H] is a batch of one. Note the order: sequence before heads.
      key: keys, [B, S, K, H], where N is a multiple of K; query head n reads head n // (N / K).
      value: values, [B, S, K, Hv]; Hv may differ from H.
      bias: added to the scores after scale and soft cap; broadcasts to [B, N, T, S]. An entry of -inf masks.
      mask: True where a query may see a key; broadcasts to [B, N, T, S].
      scale: factor of the scores; 1 / sqrt(H) by default. A Python number.
      is_causal: query t sees no key after the diagonal.
      query_seq_lengths: valid queries of each batch element, [B], 0 to T; later rows give 0. Values are
        checked where they are concrete.
      key_value_seq_lengths: valid keys of each batch element, [B], 0 to S. Values are checked likewise.
      local_window_size: keys seen on either side of the diagonal, not counting the diagonal itself:
        an int or (left, right), None for no bound. A sliding window of W tokens that counts the query's
        own is (W - 1, 0).
      logits_soft_cap: `cap * tanh(scores / cap)`, applied before bias and mask.
      causal_alignment: `top_left`: the diagonal joins query 0 and key 0. `bottom_right`: it joins the last
        valid query and the last valid key, as in decoding with a cache. Windows follow the same diagonal.
      q_segment_ids: a query sees only keys of an equal segment id, [B, T].
      kv_segment_ids: segment ids of the keys, [B, S].
      return_residual: also return the log-sum-exp of each row's scores, [B, T, N], float32.

    Returns:
      The output, [B, T, N, Hv], in the dtype of `query`; with `return_residual` a pair of it and the
      log-sum-exp.

    Raises:
      ArgumentError: a rank, shape, dtype or value is not allowed.
    """
    check = Checker("attention")
    query, key, value = (
        check.floating(name, array) for name, array in (("query", query), ("key", key), ("value", value))
    )
    batched = query.ndim == 4
    for name, array in (("query", query), ("key", key), ("value", value)):
        if array.ndim not in (3, 4) or array.ndim != query.ndim:
            raise check.error(name, f"shape {array.shape}", "[B, T, N, H] (or [T, N, H]), the same rank for all three")
    if not batched:
        query, key, value = query[None], key[None], value[None]
    B, T, N, H = query.shape
    S, K, Hv = key.shape[1], key.shape[2], value.shape[3]
    if key.shape != (B, S, K, H):
        raise check.error("key", f"shape {key.shape}", f"[{B}, S, K, {H}] for a query of shape {query.shape}")
    if value.shape != (B, S, K, Hv):
        raise check.error("value", f"shape {value.shape}", f"[{B}, {S}, {K}, Hv] for a key of shape {key.shape}")
    if K == 0 or N % K:
        raise check.error(
            "key", f"{K} heads for {N} query heads", "a number of key/value heads that divides the query heads",
            "The layout is [B, S, heads, H]: sequence before heads.",
        )  # fmt: skip
    dtype = query.dtype
    common = jnp.result_type(query, key, value)
    operands: dict[str, Any] = {
        "query": query.astype(common), "key": key.astype(common), "value": value.astype(common)
    }  # fmt: skip

    if bias is not None:
        if jnp.asarray(bias).dtype == bool:
            raise check.error(
                "bias", "a boolean array", "a floating array", "A boolean mask goes to `mask`.", type_=True
            )
        bias = check.floating("bias", bias)
        operands["bias"] = _broadcastable(check, "bias", bias, (B, N, T, S))
    if mask is not None:
        mask = check.array("mask", mask)
        if mask.dtype != bool:
            raise check.error(
                "mask", f"dtype {mask.dtype}", "bool, True where a query may see a key",
                "An additive mask goes to `bias`.", type_=True,
            )  # fmt: skip
        operands["mask"] = _broadcastable(check, "mask", mask, (B, N, T, S))
    for name, short, lengths in (
        ("query_seq_lengths", "q_lengths", query_seq_lengths),
        ("key_value_seq_lengths", "kv_lengths", key_value_seq_lengths),
    ):
        if lengths is not None:
            lengths = check.integer(name, lengths)
            if lengths.shape != (B,) and (batched or lengths.shape != ()):
                raise check.error(name, f"shape {lengths.shape}", f"[{B}], one length for each batch element")
            operands[short] = lengths.reshape(B).astype(jnp.int32)
    if (q_segment_ids is None) != (kv_segment_ids is None):
        missing = "q_segment_ids" if q_segment_ids is None else "kv_segment_ids"
        raise check.error(missing, "None", "both segment id arguments or neither")
    for name, short, ids, length in (
        ("q_segment_ids", "q_segments", q_segment_ids, T),
        ("kv_segment_ids", "kv_segments", kv_segment_ids, S),
    ):
        if ids is not None:
            ids = check.integer(name, ids)
            if ids.shape != (B, length) and (batched or ids.shape != (length,)):
                raise check.error(name, f"shape {ids.shape}", f"[{B}, {length}]")
            operands[short] = ids.reshape(B, length).astype(jnp.int32)

    scale = 1.0 / math.sqrt(max(H, 1)) if scale is None else check.number("scale", scale)
    if logits_soft_cap is not None:
        logits_soft_cap = check.number("logits_soft_cap", logits_soft_cap)
        if not logits_soft_cap > 0:
            raise check.error("logits_soft_cap", repr(logits_soft_cap), "a positive number, or None for no cap")
    if causal_alignment not in ("top_left", "bottom_right"):
        raise check.error("causal_alignment", repr(causal_alignment), "'top_left' or 'bottom_right'")
    left, right = _window(check, local_window_size)
    if check.boolean("is_causal", is_causal):
        right = 0
    return_residual = check.boolean("return_residual", return_residual)
    params = AttentionParams(
        scale, left, right, causal_alignment == "bottom_right" and (left, right) != (None, None), logits_soft_cap
    )

    def finish(outputs: Outputs) -> Any:
        out = outputs["out"].astype(dtype)
        out = out if batched else out[0]
        if not return_residual:
            return out
        lse = outputs["lse"].astype(jnp.float32)
        return out, lse if batched else lse[0]

    wanted = ("out", "lse") if return_residual else ("out",)
    return Call(make_request("attention", operands, params, wanted), operands, finish)


def _broadcastable(check: Checker, name: str, array: Any, full: tuple[int, ...]) -> Any:
    B, N, T, S = full
    if array.ndim == 3:
        raise check.error(
            name, f"shape {array.shape}", f"four axes that broadcast to {full}",
            f"Three axes could mean either of two things: write [{B}, 1, {T}, {S}] for one {name} per batch element "
            f"or [1, {N}, {T}, {S}] for one per head.",
        )  # fmt: skip
    shape = (1,) * (4 - array.ndim) + array.shape
    if array.ndim > 4 or any(size not in (1, wide) for size, wide in zip(shape, full, strict=True)):
        raise check.error(name, f"shape {array.shape}", f"a shape that broadcasts to [B, N, T, S] = {full}")
    return array.reshape(shape)


def _window(check: Checker, window: Any) -> tuple[int | None, int | None]:
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2:
        raise check.error("local_window_size", repr(window), "an int, or a pair (left, right)")
    for side in sides:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, int | np.integer) or side < 0:
            raise check.error(
                "local_window_size", repr(window), "non-negative ints, or None for no bound",
                "A library that writes -1 for no bound means None here.",
            )  # fmt: skip
    left, right = sides
    return (None if left is None else int(left)), (None if right is None else int(right))


def check_values(values: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Checks concrete lengths against the sequence lengths."""
    for name, of in (("query_seq_lengths", "query"), ("key_value_seq_lengths", "key")):
        limit = shapes[of][-3]
        lengths = values.get(name)
        if lengths is not None and lengths.size and (lengths.min() < 0 or lengths.max() > limit):
            raise Checker("attention").error(name, f"values {lengths.tolist()}", f"0 to {limit}, the length of {of!r}")


def outputs(request: Request) -> dict[str, ArraySpec]:
    """`out` [B, T, N, Hv] in the dtype of the query; `lse` [B, T, N] in the accumulator's dtype."""
    query = request["query"]
    B, T, N, _ = query.shape
    return {
        "out": ArraySpec((B, T, N, request["value"].shape[-1]), query.dtype),
        "lse": ArraySpec((B, T, N), accumulator(query.dtype)),
    }


def without_scores(request: Request) -> Outputs | None:
    """The outputs, or cotangents, of a request in which no query meets any key; None for all others.

    Kernels have no grid over nothing.
    """
    (B, T, N, _), S = request["query"].shape, request["key"].shape[1]
    if B and T and N and S:
        return None
    if request.op != "attention":
        return {name: jnp.zeros(request[name].shape, request[name].dtype) for name in request.wanted}
    specs = outputs(request)
    return {
        "out": jnp.zeros(specs["out"].shape, specs["out"].dtype),
        "lse": jnp.full(specs["lse"].shape, -jnp.inf, specs["lse"].dtype),
    }


def cost(request: Request) -> Cost:
    """Two products over the visible part of the score matrix, bounded by the static band."""
    B, T, N, H = request["query"].shape
    S, Hv = request["value"].shape[1], request["value"].shape[-1]
    params: AttentionParams = request.params
    pairs = T * S
    if params.banded:
        rows = np.arange(T)
        shift = S - T if params.bottom_right else 0
        first = 0 if params.left is None else np.clip(rows + shift - params.left, 0, S)
        last = S if params.right is None else np.clip(rows + shift + params.right + 1, 0, S)
        pairs = int(np.maximum(last - first + np.zeros(T, np.int64), 0).sum())
    moved = sum(spec.nbytes for _, spec in request.operands) + outputs(request)["out"].nbytes
    return Cost(flops=2 * B * N * pairs * (H + Hv), bytes=moved)


def _cases() -> Any:
    from opmux.core.cases.attention import cases

    return cases()


OP = Op(
    name="attention",
    canonicalize=canonicalize,
    outputs=outputs,
    reference=reference,
    cost=cost,
    static=(
        "scale", "is_causal", "local_window_size", "logits_soft_cap", "causal_alignment", "return_residual",
    ),
    differentiable=("query", "key", "value", "bias"),
    residuals=("out", "lse"),
    check_values=check_values,
    value_checked=("query_seq_lengths", "key_value_seq_lengths"),
    batch=tuple,
    cases=_cases,
)  # fmt: skip

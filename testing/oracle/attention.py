"""The oracle of `attention`: an ordinary softmax over the list of keys that a row keeps, one row at a time."""

from __future__ import annotations

from typing import Any

import numpy as np


def attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    causal_alignment: str = "top_left",
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    return_residual: bool = False,
) -> Any:
    """Attention in float64, with the public signature of the op.

    Keys that a row does not keep are never read, so nothing they hold can matter; keys that it keeps are
    read as they are, so a NaN among them shows.

    Args:
      query: [B, T, N, H] or [T, N, H].
      key: [B, S, K, H] or [S, K, H].
      value: [B, S, K, Hv] or [S, K, Hv].
      bias: broadcasts to [B, N, T, S]; -inf removes a key.
      mask: broadcasts to [B, N, T, S]; False removes a key.
      scale: factor of the scores; 1 / sqrt(H) by default.
      is_causal: removes the keys after the diagonal.
      query_seq_lengths: [B]; rows from there on are 0.
      key_value_seq_lengths: [B]; keys from there on do not exist.
      local_window_size: keys kept on either side of the diagonal.
      logits_soft_cap: cap of the scores before the bias.
      causal_alignment: `top_left` or `bottom_right`.
      q_segment_ids: [B, T]; a row keeps the keys of its own segment.
      kv_segment_ids: [B, S].
      return_residual: also return the log-sum-exp, [B, T, N].

    Returns:
      The output, float64 [B, T, N, Hv] ([T, N, Hv] for rank 3), alone or with the log-sum-exp.
    """
    q, k, v = (np.asarray(array, np.float64) for array in (query, key, value))
    if q.ndim == 3:
        one = attention(
            q[None], k[None], v[None], bias, mask, scale=scale, is_causal=is_causal,
            query_seq_lengths=_batch_of_one(query_seq_lengths, 0),
            key_value_seq_lengths=_batch_of_one(key_value_seq_lengths, 0),
            local_window_size=local_window_size, logits_soft_cap=logits_soft_cap, causal_alignment=causal_alignment,
            q_segment_ids=_batch_of_one(q_segment_ids, 1), kv_segment_ids=_batch_of_one(kv_segment_ids, 1),
            return_residual=True,
        )  # fmt: skip
        return (one[0][0], one[1][0]) if return_residual else one[0][0]

    B, T, N, H = q.shape
    S, K, Hv = v.shape[1:]
    factor = scale if scale is not None else (H or 1) ** -0.5
    left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size, local_window_size)
    added = None if bias is None else np.broadcast_to(np.asarray(bias, np.float64), (B, N, T, S))
    allowed = None if mask is None else np.broadcast_to(np.asarray(mask), (B, N, T, S))
    out = np.zeros((B, T, N, Hv))
    lse = np.full((B, T, N), -np.inf)

    for b in range(B):
        rows = T if query_seq_lengths is None else int(np.asarray(query_seq_lengths)[b])
        columns = S if key_value_seq_lengths is None else int(np.asarray(key_value_seq_lengths)[b])
        for n in range(N):
            head = n // (N // K)
            for t in range(rows):
                kept = np.arange(columns)
                here = t if causal_alignment == "top_left" else columns - (rows - t)
                if is_causal:
                    kept = kept[kept <= here]
                if left is not None:
                    kept = kept[kept >= here - left]
                if right is not None:
                    kept = kept[kept <= here + right]
                if allowed is not None:
                    kept = kept[allowed[b, n, t, kept]]
                if q_segment_ids is not None:
                    kept = kept[np.asarray(kv_segment_ids)[b, kept] == np.asarray(q_segment_ids)[b, t]]
                if added is not None:
                    kept = kept[added[b, n, t, kept] != -np.inf]
                if not kept.size:
                    continue
                scores = k[b, kept, head] @ q[b, t, n] * factor
                if logits_soft_cap is not None:
                    scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
                if added is not None:
                    scores = scores + added[b, n, t, kept]
                weights = np.exp(scores - scores.max())
                out[b, t, n] = weights @ v[b, kept, head] / weights.sum()
                lse[b, t, n] = scores.max() + np.log(weights.sum())
    return (out, lse) if return_residual else out


def _batch_of_one(array: Any, rank: int) -> Any:
    """An argument of a batch of one, which may come with or without its batch axis."""
    if array is None:
        return None
    array = np.asarray(array)
    return array[None] if array.ndim == rank else array

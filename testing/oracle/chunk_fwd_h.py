"""The oracle of `chunk_fwd_h`: the recurrence itself, one token after another."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np


def chunk_fwd_h(
    k: Any,
    v: Any,
    g: Any = None,
    g_gamma: Any = None,
    gk: Any = None,
    gv: Any = None,
    h0: Any = None,
    *,
    output_final_state: bool = False,
    cu_seqlens: Any = None,
    chunk_size: int = 64,
    split_size: int | None = None,
    states_in_fp32: bool = False,
    gates: str = "cumulative",
) -> tuple[np.ndarray, np.ndarray | None]:
    """The states in float64, with the public signature of the op.

    Nothing is chunked: the state decays and takes up one token at a time, and is noted down wherever a
    split begins.

    Args:
      k: [B, T, H, K].
      v: [B, T, H, V].
      g: [B, T, H].
      g_gamma: [H].
      gk: [B, T, H, K].
      gv: [B, T, H, V].
      h0: [N, H, K, V].
      output_final_state: also return the last state of every sequence.
      cu_seqlens: [N + 1].
      chunk_size: tokens after which cumulative gates start again.
      split_size: tokens between the states that are noted down.
      states_in_fp32: of no effect here.
      gates: `cumulative` or `raw`.

    Returns:
      `h`, float64 [B, NS, H, K, V], and `ht`, float64 [N, H, K, V] or None.
    """
    k, v = np.asarray(k, np.float64), np.asarray(v, np.float64)
    B, T, H, K = k.shape
    V = v.shape[3]
    every = split_size or chunk_size
    if cu_seqlens is None:
        spans = [(b, 0, T) for b in range(B)]
    else:
        edges = [int(edge) for edge in np.asarray(cu_seqlens)]
        spans = [(0, begin, end) for begin, end in pairwise(edges)]
    start = np.zeros((len(spans), H, K, V)) if h0 is None else np.asarray(h0, np.float64)

    noted: list[list[np.ndarray]] = [[] for _ in range(B)]
    final = np.empty((len(spans), H, K, V))
    for n, (b, begin, end) in enumerate(spans):
        log_decay = np.zeros((end - begin, H, K, V))
        for gate, axes in ((g, (2, 3)), (gk, (3,)), (gv, (2,))):
            if gate is not None:
                here = np.asarray(gate, np.float64)[b, begin:end]
                if gates == "cumulative":
                    here = _per_token(here, chunk_size)
                log_decay += np.expand_dims(here, axes)
        if g_gamma is not None:
            log_decay += np.asarray(g_gamma, np.float64)[:, None, None]
        state = start[n]
        for t in range(end - begin):
            if t % every == 0:
                noted[b].append(state)
            write = k[b, begin + t, :, :, None] * v[b, begin + t, :, None, :]
            state = np.exp(log_decay[t]) * state + write
        final[n] = state

    num_splits = -(-T // every) if cu_seqlens is None else len(noted[0])
    h = np.zeros((B, num_splits, H, K, V))
    for b, states in enumerate(noted):
        for row, state in enumerate(states):
            h[b, row] = state
    return h, final if output_final_state else None


def _per_token(running: np.ndarray, chunk_size: int) -> np.ndarray:
    """Undoes running sums that start again every `chunk_size` tokens."""
    steps = np.diff(running, axis=0, prepend=0)
    steps[::chunk_size] = running[::chunk_size]
    return steps

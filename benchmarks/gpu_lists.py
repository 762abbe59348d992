"""The lists of `gpu.py`: which calls are checked, and which are timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from gpu_problems import (
    BACKWARD,
    BF16,
    BOTH,
    F8,
    F16,
    F32,
    FORWARD,
    I8,
    I32,
    Direction,
    Maker,
    Problem,
    add,
    attention,
    chunk_fwd_h,
    matmul,
    normal,
    reduce,
)

TF32 = 2e-3
"""Tolerance of products whose operands are rounded to ten bits."""


def numerics(small: bool) -> Iterator[Problem]:
    """Calls whose results are compared: each kind of kernel, dtype and feature, at odd sizes too."""
    yield from _dense_numerics(small)
    yield from _attention_numerics(small)
    yield from _chunk_numerics(small)


def speed(small: bool) -> Iterator[Problem]:
    """Calls that are timed, one direction each."""
    yield from _matmul_speed(small)
    yield from _attention_speed(small)
    yield from _chunk_speed(small)
    yield from _dense_speed(small)


def _sizer(small: bool) -> Callable[[int, int], int]:
    return lambda full, tiny: tiny if small else full


def _dense_numerics(small: bool) -> Iterator[Problem]:
    n = _sizer(small)
    rows, columns = n(2000, 40), n(2056, 136)
    yield add((rows, columns), (rows, columns), F32)
    yield add((rows, columns), (rows, columns), BF16)
    yield add((rows, columns), (columns,), F16)
    yield add((n(1023, 33), n(777, 65)), (n(1023, 33), 1), I32, tier=1)
    yield reduce("sum", (rows, columns), -1, F32)
    yield reduce("sum", (rows, columns), 0, F32)
    yield reduce("mean", (rows, columns), -1, BF16)
    yield reduce("max", (rows, columns), 0, BF16)
    yield reduce("min", (n(1023, 33), n(777, 65)), None, F16, tier=1)
    yield reduce("prod", (n(1023, 33), n(777, 65)), -1, F32, tier=1)
    yield reduce("sum", (rows, columns), -1, I32, tier=1)
    size = n(1024, 128)
    yield matmul(size, size, size, BF16)
    yield matmul(n(1000, 100), n(1032, 136), n(2056, 72), BF16)
    yield matmul(size, size, size, F16)
    yield matmul(size, size, size, F32)
    yield matmul(size, size, size, F32, precision="tensorfloat32", tolerance=TF32)
    yield matmul(n(777, 65), n(515, 67), n(301, 69), BF16, tier=1)
    yield matmul(n(300, 64), n(256, 64), n(512, 64), BF16, batch=(n(8, 2),))
    yield matmul(size, size, size, I8, preferred_element_type=I32, directions=FORWARD)
    yield matmul(size, size, size, F8, preferred_element_type=F32, directions=FORWARD, tier=1)
    yield matmul(1, n(4096, 128), n(4096, 128), BF16, tier=1)


def _attention_numerics(small: bool) -> Iterator[Problem]:
    n = _sizer(small)
    B, T, N = n(2, 1), n(1024, 128), n(8, 1)
    odd = n(777, 70)
    yield attention("full", B, T, N, 128)
    yield attention("causal", B, T, N, 128, is_causal=True)
    yield attention("causal", B, T, N, 64, is_causal=True, dtype=F16)
    yield attention("full", B, T, N, 64)
    yield attention("causal", B, T, 2 * N, 128, K=n(4, 1), is_causal=True)
    yield attention("causal", B, odd, N, 128, is_causal=True)
    yield attention("bottom right", B, odd, N, 64, S=n(1000, 90), is_causal=True, causal_alignment="bottom_right")
    yield attention("residual", B, T, N, 128, return_residual=True, tier=1)
    yield attention("window", B, T, N, 64, local_window_size=(n(100, 30), n(17, 5)))
    yield attention("soft cap", B, T, N, 64, logits_soft_cap=20.0, tier=1)
    yield attention("lengths", B, T, N, 64, makers={"key_value_seq_lengths": _lengths(B, T)})
    segments = {"q_segment_ids": _segments(B, T), "kv_segment_ids": _segments(B, T)}
    yield attention("segments", B, T, N, 64, makers=segments)
    yield attention("bias", B, T, N, 64, makers={"bias": normal(1, N, T, T)})
    yield attention("mask", B, T, N, 64, makers={"mask": _mask(B, T)}, tier=1)
    for head in (32, 96, 192, 256):
        yield attention("full", B, T, N, head, tier=1)
    yield attention("causal", B, T, N, 128, Hv=64, is_causal=True, tier=1)
    yield attention("full", B, T, N, 64, dtype=F32, tier=1)


def _chunk_numerics(small: bool) -> Iterator[Problem]:
    n = _sizer(small)
    B, T, H, K = n(2, 1), n(1024, 128), n(4, 1), n(128, 64)
    yield chunk_fwd_h("no gate", B, T, H, K, K)
    yield chunk_fwd_h("", B, T, H, K, K, ("g",))
    yield chunk_fwd_h("", B, T, H, K, K, ("gk", "h0"), output_final_state=True)
    yield chunk_fwd_h("", B, T, H, 64, 64, ("gv",))
    yield chunk_fwd_h("", B, T, H, 64, K, ("g", "g_gamma"), tier=1)
    yield chunk_fwd_h("", B, n(1000, 100), H, K, K, ("g", "gk"))
    yield chunk_fwd_h("", B, T, H, K, K, ("g",), dtype=F16, tier=1)
    yield chunk_fwd_h("", B, T, H, 64, 64, ("gk",), dtype=F32)
    ends = np.asarray([0, 0, T // 3, T // 3 + 5, T], np.int32)
    yield chunk_fwd_h("packed g", 1, T, H, K, K, ("g",), cu_seqlens=ends, output_final_state=True)
    yield chunk_fwd_h("split g", B, n(1024, 200), H, 64, 64, ("g",), split_size=128, states_in_fp32=True, tier=1)
    yield chunk_fwd_h("gk", B, T, H, n(256, 32), n(256, 32), ("gk",), tier=1)


def _matmul_speed(small: bool) -> Iterator[Problem]:
    n = _sizer(small)
    large, larger = n(4096, 128), n(8192, 256)
    yield matmul(large, large, large, BF16, directions=FORWARD)
    yield matmul(larger, larger, larger, BF16, directions=FORWARD)
    yield matmul(large, large, large, BF16, directions=BACKWARD)
    yield matmul(larger, larger, larger, BF16, directions=BACKWARD, tier=1)
    yield matmul(larger, larger, larger, F16, directions=FORWARD, tier=2)
    yield matmul(large, large, large, F32, precision="tensorfloat32", tolerance=TF32, directions=FORWARD, tier=1)
    yield matmul(larger, larger, larger, I8, directions=FORWARD, tier=1, preferred_element_type=I32)
    yield matmul(larger, larger, larger, F8, directions=FORWARD, tier=2, preferred_element_type=BF16)
    yield matmul(n(2048, 128), n(2048, 128), n(2048, 64), BF16, batch=(n(16, 2),), directions=FORWARD, tier=2)
    yield matmul(n(4000, 100), n(4104, 136), n(4072, 72), BF16, directions=FORWARD, tier=2)


def _attention_speed(small: bool) -> Iterator[Problem]:
    n = _sizer(small)
    tokens = n(16384, 128)

    def of(
        head: int, T: int, causal: bool, direction: Direction, tier: int, *, heads: int = 16, K: int | None = None
    ) -> Problem:
        words = "causal" if causal else "full"
        return attention(
            words, max(1, tokens // T), T, n(heads, 2), head, K=K and n(K, 1), is_causal=causal, tier=tier,
            directions=(direction,),
        )  # fmt: skip

    for direction in BOTH:
        for tier, T in enumerate((n(8192, 256), n(2048, 128))):
            for head in (128, 64):
                for causal in (False, True):
                    yield of(head, T, causal, direction, tier)
        for causal in (True, False):
            yield of(128, n(8192, 256), causal, direction, 0 if causal else 2, heads=32, K=8)
    T = n(8192, 256)
    yield attention(
        "window", max(1, tokens // T), T, n(16, 2), 128, is_causal=True, local_window_size=(n(1023, 63), 0), tier=2,
        directions=FORWARD,
    )  # fmt: skip


def _chunk_speed(small: bool) -> Iterator[Problem]:
    n = _sizer(small)
    B, T, H = n(2, 1), n(8192, 128), n(32, 1)
    for tier, direction in enumerate(BOTH):
        yield chunk_fwd_h("", B, T, H, n(128, 64), n(128, 64), ("g",), directions=(direction,), tier=0)
        yield chunk_fwd_h("", B, T, H, n(128, 64), n(128, 64), ("gk",), directions=(direction,), tier=1)
        yield chunk_fwd_h("no gate", B, T, H, n(128, 64), n(128, 64), directions=(direction,), tier=1 + tier)
        yield chunk_fwd_h("", B, T, H, n(64, 32), n(64, 32), ("gk",), directions=(direction,), tier=2)
    ends = np.linspace(0, T, n(17, 3)).astype(np.int32)
    yield chunk_fwd_h(
        "packed g", 1, T, n(64, 1), n(128, 64), n(128, 64), ("g",), cu_seqlens=ends, directions=FORWARD, tier=1
    )


def _dense_speed(small: bool) -> Iterator[Problem]:
    shape = (64, 128) if small else (16384, 16384)
    yield reduce("sum", shape, -1, F32, directions=FORWARD)
    yield reduce("sum", shape, 0, F32, directions=FORWARD)
    yield reduce("max", shape, -1, BF16, directions=FORWARD, tier=1)
    yield reduce("sum", shape, None, BF16, directions=FORWARD, tier=1)
    yield add(shape, shape, F32, directions=FORWARD)
    yield add(shape, shape, BF16, directions=FORWARD)
    yield add(shape, shape[1:], BF16, directions=FORWARD, tier=1)


def _lengths(B: int, S: int) -> Maker:
    return lambda key: S - (jnp.arange(B, dtype=I32) + 1) * (S // 3)


def _segments(B: int, T: int) -> Maker:
    return lambda key: jnp.broadcast_to(jnp.arange(T, dtype=I32) * 3 // T, (B, T))


def _mask(B: int, T: int) -> Maker:
    return lambda key: jax.random.bernoulli(key, 0.7, (B, 1, T, T))

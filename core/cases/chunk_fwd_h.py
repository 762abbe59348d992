"""Cases of `chunk_fwd_h`: gates, tails, packed sequences, and the reports of users of other libraries.

Gates are drawn per token; the cases with cumulative gates (the op's default) sum them up in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from opmux.core.cases.case import Case

F32, BF16, F16 = np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16)

Arrays = dict[str, Any]
Edit = Callable[[Arrays], None]


def cases() -> list[Case]:
    """Every case."""
    return [*_gates(), *_shapes(), *_tails(), *_packed(), *_strong(), *_dtypes(), *_not_finite(), *_golden()]


def make_case(
    name: str,
    gates: Sequence[str] = (),
    edit: Edit | None = None,
    *,
    B: int = 2,
    T: int = 37,
    H: int = 2,
    K: int = 5,
    V: int = 3,
    h0: bool = False,
    dtype: Any = F32,
    grad: bool = True,
    rtol: float | None = None,
    source: str = "",
    transforms: bool = False,
    long: bool = False,
    cu_seqlens: list[int] | None = None,
    chunk_size: int = 16,
    raw: bool = True,
    **options: Any,
) -> Case:
    """A case with the given gates; `edit` changes the arrays in place while the gates are per token.

    Keys and values of 16 bits may be rounded to their dtype once they are gated, so a float32 state has no more digits.
    """
    if rtol is None and dtype in (BF16, F16):
        rtol = 2 * float(jnp.finfo(dtype).eps)
    if cu_seqlens is not None:
        B, T = 1, cu_seqlens[-1]

    def build(rng: np.random.Generator) -> tuple[tuple[Any, ...], Arrays]:
        N = B if cu_seqlens is None else len(cu_seqlens) - 1
        shapes = {"g": (B, T, H), "g_gamma": (H,), "gk": (B, T, H, K), "gv": (B, T, H, V)}
        arrays: Arrays = {
            "k": rng.standard_normal((B, T, H, K)).astype(dtype),
            "v": rng.standard_normal((B, T, H, V)).astype(dtype),
        }
        for gate in gates:
            arrays[gate] = -0.2 * rng.random(shapes[gate])
        if h0:
            arrays["h0"] = rng.standard_normal((N, H, K, V)).astype(F32)
        if edit is not None:
            edit(arrays)
        for gate in gates:
            if not raw and gate != "g_gamma":
                arrays[gate] = chunk_local_cumsum(arrays[gate], chunk_size, cu_seqlens)
            arrays[gate] = arrays[gate].astype(F32) if arrays[gate].dtype == np.float64 else arrays[gate]
        if cu_seqlens is not None:
            arrays["cu_seqlens"] = np.asarray(cu_seqlens, np.int32)
        static = {"chunk_size": chunk_size, "gates": "raw" if raw else "cumulative", "output_final_state": True}
        return (arrays.pop("k"), arrays.pop("v")), {**arrays, **static, **options}

    return Case(name, build, grad=grad, rtol=rtol, source=source, transforms=transforms, long=long)


def chunk_local_cumsum(gate: np.ndarray, chunk_size: int, cu_seqlens: Sequence[int] | None = None) -> np.ndarray:
    """Running sums along axis 1 that restart at every chunk and at every sequence."""
    total = np.empty(gate.shape, np.float64)
    edges = (0, gate.shape[1]) if cu_seqlens is None else cu_seqlens
    for begin, end in pairwise(edges):
        for start in range(begin, end, chunk_size):
            stop = min(start + chunk_size, end)
            total[:, start:stop] = np.cumsum(gate[:, start:stop].astype(np.float64), axis=1)
    return total


def _gates() -> Iterator[Case]:
    yield make_case("no_gates")
    for gate in ("g", "gk", "gv"):
        yield make_case(f"{gate}_raw", (gate,), h0=True)
        yield make_case(f"{gate}_cumulative", (gate,), h0=True, raw=False)
    yield make_case("g_gamma", ("g_gamma",), h0=True)
    yield make_case("g_and_g_gamma", ("g", "g_gamma"), source="fla: one decay overwrote the other")
    yield make_case("all_raw", ("g", "g_gamma", "gk", "gv"), h0=True, transforms=True)
    yield make_case("all_cumulative", ("g", "g_gamma", "gk", "gv"), h0=True, raw=False)
    yield make_case("growth", ("g",), lambda a: a.update(g=-a["g"]), raw=False)


def _shapes() -> Iterator[Case]:
    yield make_case("initial_state", h0=True, source="fla#351")
    yield make_case("states_only", ("gk",), output_final_state=False)
    yield make_case("ones", ("g", "gk", "gv"), B=1, T=1, H=1, K=1, V=1, h0=True)
    yield make_case("short_sequence", ("gk",), T=5, chunk_size=64, h0=True, source="fla#88; fla#22")
    yield make_case("short_cumulative", ("gk", "g"), T=5, chunk_size=64, raw=False)
    yield make_case("no_tokens", ("gk",), T=0, h0=True, source="FlashKDA#32; flashinfer#3536")
    yield make_case("no_heads", ("gk",), H=0)
    yield make_case("no_batch", ("gk",), B=0)
    yield make_case("no_key_channels", ("gv",), K=0)
    yield make_case("chunk_of_one", ("g", "gk"), T=9, chunk_size=1, raw=False, h0=True)
    yield make_case("chunk_of_seven", ("g", "gk", "gv"), chunk_size=7, raw=False)
    yield make_case("wide_odd", ("gk", "gv"), B=1, T=70, H=3, K=67, V=131, source="tops: K tile for V tile")
    yield make_case("split", ("g", "g_gamma", "gk", "gv"), T=83, chunk_size=8, split_size=24, h0=True)
    yield make_case("split_cumulative", ("g", "gk", "gv"), T=83, chunk_size=8, split_size=24, h0=True, raw=False)
    yield make_case("split_past_the_end", ("g", "gk"), T=19, chunk_size=8, split_size=64, raw=False)


def _tails() -> Iterator[Case]:
    tail = "flash-linear-attention-npu#407; fla#1142"
    for raw in (True, False):
        kind = "raw" if raw else "cumulative"
        yield make_case(f"tail_of_one_{kind}", ("g", "gk", "gv"), T=33, raw=raw, h0=True, source=tail)
        yield make_case(f"tail_of_fifteen_{kind}", ("g", "g_gamma"), T=31, raw=raw, source=tail)


def _packed() -> Iterator[Case]:
    every = ("g", "g_gamma", "gk", "gv")
    yield make_case("packed", every, cu_seqlens=[0, 20, 21, 37, 60], h0=True, transforms=True, source="slime#1686")
    yield make_case("packed_cumulative", every, cu_seqlens=[0, 20, 21, 37, 60], h0=True, raw=False)
    yield make_case("packed_no_h0", ("gk",), cu_seqlens=[0, 20, 21, 37, 60])
    yield make_case("packed_one", ("g",), cu_seqlens=[0, 65], chunk_size=64, h0=True, raw=False)
    yield make_case("packed_odd", ("g", "gv"), cu_seqlens=[0, 50, 192], chunk_size=64, h0=True)
    yield make_case("packed_empty_first", ("gk",), cu_seqlens=[0, 0, 16], h0=True, source="fla#103; fla#1121")
    yield make_case("packed_empty_inside", ("g",), cu_seqlens=[0, 0, 16, 48], h0=True, source="vllm-ascend#11438")
    yield make_case("packed_empty_whole_chunks", ("gk",), cu_seqlens=[0, 64, 64, 192], chunk_size=64, h0=True)
    yield make_case("packed_empty_last", ("gk",), cu_seqlens=[0, 5, 5, 5], h0=True, raw=False)
    yield make_case("packed_all_empty", ("gk",), cu_seqlens=[0, 0, 0], h0=True, source="FlashKDA#32; flashinfer#3536")
    yield make_case("packed_no_sequence", ("gk",), cu_seqlens=[0])
    yield make_case(
        "packed_split", every, cu_seqlens=[0, 3, 61, 61, 100], chunk_size=8, split_size=24, h0=True, raw=False
    )
    yield make_case("packed_split_raw", every, cu_seqlens=[0, 3, 61, 61, 100], chunk_size=8, split_size=24, h0=True)
    yield make_case("packed_short_split", ("g",), cu_seqlens=[0, 3, 14, 19], chunk_size=4, split_size=64, raw=False)
    yield make_case("packed_forty", ("g",), cu_seqlens=[4 * n for n in range(41)], H=1, K=8, V=8, chunk_size=4)
    yield make_case("packed_many", ("g",), cu_seqlens=[4 * n for n in range(2051)], H=3, K=2, V=2, chunk_size=4,
                    grad=False, long=True, source="fla#1239")  # fmt: skip


def _strong() -> Iterator[Case]:
    def gate(name: str, index: Any, value: float) -> Edit:
        return lambda arrays: arrays[name].__setitem__(index, value)

    def constant(value: float) -> Edit:
        return lambda arrays: arrays.update(g_gamma=np.full(arrays["g_gamma"].shape, value))

    yield make_case("gamma_short_tail", ("g_gamma",), constant(-1.41), T=65, chunk_size=64, source="fla: NaN in ht")
    yield make_case("gamma_lightning", ("g_gamma",), constant(-3.0), T=130, chunk_size=64, source="fla: NaN in ht")
    yield make_case(
        "gamma_large_chunk", ("g_gamma",), constant(-0.8), T=150, chunk_size=128, source="fla#122; tops#123"
    )
    yield make_case("decay_to_nothing", ("g",), gate("g", ..., np.log(1e-12)), T=70, chunk_size=32, source="cuLA#89")
    yield make_case("decay_to_nothing_cumulative", ("g",), gate("g", ..., np.log(1e-12)), T=70, chunk_size=32,
                    raw=False, source="cuLA#89; fla#20; fla#547")  # fmt: skip
    for name in ("g", "gk", "gv"):
        reset = gate(name, np.s_[:, 21], -np.inf)
        yield make_case(f"{name}_reset", (name,), reset, h0=True, source="fla: NaN after a gate of -inf")
    # Each of these loses digits where sums from the start of the chunk are subtracted.
    yield make_case("gate_of_a_million", ("g",), gate("g", np.s_[:, 5], -1e6), h0=True)
    yield make_case("twenty_gates_of_20", ("gk",), gate("gk", np.s_[:, 4:24], -20.0), T=70, chunk_size=64, h0=True)
    yield make_case("packed_reset", ("gk", "g_gamma"), gate("gk", np.s_[:, 7], -np.inf), cu_seqlens=[0, 5, 9, 9, 40],
                    h0=True)  # fmt: skip
    yield make_case("split_reset", ("g", "gv"), gate("g", np.s_[:, 30], -np.inf), T=60, chunk_size=8, split_size=24)


def _dtypes() -> Iterator[Case]:
    every = ("g", "g_gamma", "gk", "gv")
    for name, dtype in (("bf16", BF16), ("f16", F16)):
        yield make_case(name, every, dtype=dtype, h0=True)
        yield make_case(f"{name}_states_in_fp32", every, dtype=dtype, h0=True, states_in_fp32=True, raw=False)
        yield make_case(f"{name}_packed", every, dtype=dtype, h0=True, cu_seqlens=[0, 20, 20, 53])
    yield make_case("mixed", ("gk",), lambda a: a.update(v=a["v"].astype(F32)), dtype=BF16)
    yield make_case("gates_and_state_bf16", ("g", "gk"), _gates_and_state_in_16_bits, h0=True)
    # Values near 1 whose running sum leaves the range where bf16 counts: the state must be carried in float32.
    yield make_case("long_bf16", (), lambda a: a.update(k=np.abs(a["k"]), v=np.abs(a["v"])), B=1, T=700, dtype=BF16)


def _gates_and_state_in_16_bits(arrays: Arrays) -> None:
    for name in ("g", "gk", "h0"):
        arrays[name] = arrays[name].astype(BF16)


def _not_finite() -> Iterator[Case]:
    def spoil(name: str, index: Any, value: float = np.nan) -> Edit:
        return lambda arrays: arrays[name].__setitem__(index, value)

    yield make_case("nan_key", ("g",), spoil("k", (0, 20, 1, 2)), grad=False)
    yield make_case("nan_value_in_the_tail", ("gk",), spoil("v", (1, 36, 0, 1)), grad=False)
    yield make_case("nan_state", ("gv",), spoil("h0", (1, 0, 2, 1)), h0=True, grad=False)
    yield make_case("nan_gate", ("gk",), spoil("gk", (0, 20, 1, 3)), grad=False)
    yield make_case("inf_value", (), spoil("v", (0, 20, 1, 1), np.inf), grad=False)
    yield make_case("nan_stays_in_its_sequence", ("gk",), spoil("k", (0, 21, 0, 0)), cu_seqlens=[0, 20, 30, 53],
                    grad=False)  # fmt: skip


def _golden() -> Iterator[Case]:
    for gates in ((), ("g",), ("g_gamma",), ("gk",), ("gv",), ("g", "gk")):
        yield Case(f"golden_{'_'.join(gates) or 'none'}", golden(gates))
    yield Case("golden_packed", golden(("gk",), [0, 5, 5, 37]))


def golden(gates: Sequence[str], cu_seqlens: list[int] | None = None, raw: bool = True) -> Callable[..., Any]:
    """Inputs made of sines, whose states are tabulated in the tests. Gates are per token unless `raw` is False."""
    B, T, H, K, V, C = 1, 37, 2, 4, 3, 16
    N = B if cu_seqlens is None else len(cu_seqlens) - 1

    def build(rng: np.random.Generator) -> tuple[tuple[Any, ...], Arrays]:
        b, t, h, i = np.ogrid[:B, :T, :H, :K]
        j = np.arange(V)
        b2, t2, h2 = b[..., 0], t[..., 0], h[..., 0]
        n, hn, ik, jv = np.ogrid[:N, :H, :K, :V]
        made: Arrays = {
            "g": -0.05 * (1 + np.cos(0.7 * t2 + h2 + b2)) - 0.01,
            "g_gamma": np.log(1 - 2.0 ** (-5 - np.arange(H))),
            "gk": -0.04 * (1 + np.sin(0.5 * t + i + h + b)) - 0.005,
            "gv": -0.03 * (1 + np.sin(0.9 * t + j - h + b)) - 0.002,
        }
        arrays: Arrays = {name: made[name] for name in gates}
        for name in gates:
            if not raw and name != "g_gamma":
                arrays[name] = chunk_local_cumsum(arrays[name], C, cu_seqlens)
        arrays["h0"] = 0.5 * np.sin(1 + n + 2 * hn + 3 * ik + 5 * jv)
        arrays = {name: array.astype(F32) for name, array in arrays.items()}
        if cu_seqlens is not None:
            arrays["cu_seqlens"] = np.asarray(cu_seqlens, np.int32)
        k = np.sin(0.37 * (t + 1) * (i + 1) + h + 2 * b).astype(F32)
        v = np.cos(0.23 * (t + 1) * (j + 1) - h + b).astype(F32)
        static = {"chunk_size": C, "output_final_state": True, "gates": "raw" if raw else "cumulative"}
        return (k, v), {**arrays, **static}

    return build

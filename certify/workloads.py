"""Calls that kernels are compiled for: few realistic ones at level `quick`, every kind at level `full`."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import islice
from typing import Any, Literal

import numpy as np
from jax.lax import Precision

from opmux.certify.job import Workload
from opmux.core.cases.case import Case
from opmux.core.op import Op
from opmux.core.request import ArraySpec

Level = Literal["quick", "full"]

FROM_CASES = 3
"""Cases that stand in at level `quick` for an op that brings no workloads."""


def workloads(op: Op, level: Level, *, backward: bool = False) -> tuple[Workload, ...]:
    """The workloads of an op, which are those of its backward too, of which level `quick` takes the first.

    An op of a plugin gives its own with `add`; without, its test cases serve.
    """
    if op.name in _WORKLOADS:
        quick, rest = _WORKLOADS[op.name]
        found = quick if level == "quick" else (*quick, *rest)
    else:
        cases = (_of_case(op, case) for case in op.cases())
        found = tuple(islice(cases, FROM_CASES) if level == "quick" else cases)
    return found[:1] if backward and level == "quick" else found


def allowed_spills(op: str) -> dict[str, int]:
    """The most spills that any workload of an op is allowed, by target or platform: what a call of it may have."""
    quick, rest = _WORKLOADS.get(op, ((), ()))
    found: dict[str, int] = {}
    for workload in (*quick, *rest):
        for where, count in workload.allowed_spills.items():
            found[where] = max(count, found.get(where, 0))
    return found


def unestimated(workload: Workload) -> Workload:
    """The workload without the compiler's estimate of cycles."""
    return workload.model_copy(update={"estimate": False})


def add(op: str, quick: Iterable[Workload], full: Iterable[Workload] = ()) -> None:
    """Gives the workloads of an op, in place of any that it had.

    Args:
      op: name of the op.
      quick: those of level `quick`.
      full: those that level `full` has in addition.
    """
    _WORKLOADS[op] = (tuple(quick), tuple(full))


def _of_case(op: Op, case: Case) -> Workload:
    args, kwargs = case.arguments()
    given = op.bind(args, kwargs).arguments
    arrays = {name: value for name, value in given.items() if name not in op.static and value is not None}
    params = {name: _plain(value) for name, value in given.items() if name in op.static}
    texts: dict[str, str | tuple[int, ...]] = {
        name: str(ArraySpec.of(np.asarray(value))) for name, value in arrays.items()
    }
    if op.prepare is not None:  # values may decide shapes
        texts |= {
            name: tuple(np.asarray(value).tolist())
            for name, value in arrays.items()
            if name in op.value_checked and np.ndim(value) == 1
        }
    return Workload(name=case.name, args=texts, params=params)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):  # precisions, which JAX takes by name too
        return value.name.lower() if isinstance(value, Precision) else value.name
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else np.dtype(value).name


def _add(name: str, x: str, y: str) -> Workload:
    return Workload(name=name, args={"x": x, "y": y})


def _reduce(name: str, x: str, **params: Any) -> Workload:
    return Workload(name=name, args={"x": x}, params=params)


# On a TPU the scores of a block, and the pieces of a transposed or exact product, are more than its 64 registers
# hold, and pass through vector memory between the matrix units. The estimates count that, and are best with blocks
# of that size.
_SCORES_SPILL = {"tpu": 12_000}
_EXACT_SCORES_SPILL = {"tpu": 25_000}  # products of float32 are made of six, whose sums pass through memory too
_PRODUCTS_SPILL = {"tpu": 4_000}
_STATES_SPILL = {"tpu": 128, "tpu-v4": 320}


def _matmul(name: str, a: str, b: str, **params: Any) -> Workload:
    return Workload(name=name, args={"a": a, "b": b}, params=params, allowed_spills=_PRODUCTS_SPILL)


def _attention(
    name: str, dtype: str, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...] | None = None,
    arrays: dict[str, str] | None = None, **params: Any,
) -> Workload:  # fmt: skip
    shapes = {"query": query, "key": key, "value": value or key}
    args = {arg: f"{dtype}[{','.join(map(str, shape))}]" for arg, shape in shapes.items()}
    spills = _SCORES_SPILL if dtype == "bf16" else _EXACT_SCORES_SPILL
    return Workload(name=name, args={**args, **(arrays or {})}, params=params, allowed_spills=spills)


def _chunk(
    name: str, dtype: str, length: int, heads: int = 4, *, k: int = 128, v: int = 128, gates: str = "gk",
    starts: tuple[int, ...] = (), **params: Any,
) -> Workload:  # fmt: skip
    sequences = len(starts) - 1 if starts else 1
    args: dict[str, str | tuple[int, ...]] = {
        "k": f"{dtype}[1,{length},{heads},{k}]",
        "v": f"{dtype}[1,{length},{heads},{v}]",
        "h0": f"f32[{sequences},{heads},{k},{v}]",
    }
    shapes = {"g": "", "gk": f",{k}", "gv": f",{v}"}
    args |= {gate: f"f32[1,{length},{heads}{shapes[gate]}]" for gate in gates.split()}
    if starts:
        args["cu_seqlens"] = starts
    # Products of float32 are made of six, and v4 has no registers to spare for any.
    spills = _STATES_SPILL if dtype == "f32" else {"tpu-v4": 512}
    return Workload(name=name, args=args, params={"output_final_state": True, **params}, allowed_spills=spills)


def _variants(*found: Workload) -> tuple[Workload, ...]:
    return tuple(workload.model_copy(update={"variant": True}) for workload in found)


_HEADS = (1, 4096, 2, 128)
_SHORT = (1, 2048, 2, 128)
_NARROW = (1, 4096, 2, 64)
_KINDS = ("mean", "max", "min", "prod")
_PACKED = (0, 640, 640, 1000, 2048)

_WORKLOADS: dict[str, tuple[tuple[Workload, ...], tuple[Workload, ...]]] = {
    "add": (
        (
            _add("f32 4096x4096", "f32[4096,4096]", "f32[4096,4096]"),
            _add("bf16 bias", "bf16[8,1024,4096]", "bf16[4096]"),
            _add("f32 odd", "f32[3,1001,517]", "f32[3,1001,517]"),
        ),
        (
            _add("bf16 4096x4096", "bf16[4096,4096]", "bf16[4096,4096]"),
            _add("f16 4096x4096", "f16[4096,4096]", "f16[4096,4096]"),
            _add("s32 4096x4096", "s32[4096,4096]", "s32[4096,4096]"),
            _add("s8 4096x4096", "s8[4096,4096]", "s8[4096,4096]"),
            _add("f32 vector", "f32[1000003]", "f32[1000003]"),
            *_variants(
                _add("f32 column", "f32[4096,4096]", "f32[4096,1]"),
                _add("f32 outer", "f32[4096,1]", "f32[1,4096]"),
                _add("f32 scalar", "f32[4096,4096]", "f32[]"),
                _add("f32 small", "f32[7]", "f32[7]"),
            ),
        ),
    ),
    "reduce": (
        (
            _reduce("f32 4096x4096 last", "f32[4096,4096]", axis=-1),
            _reduce("f32 4096x4096 first", "f32[4096,4096]", axis=0),
            _reduce("bf16 mean middle odd", "bf16[8,1000,515]", kind="mean", axis=1),
        ),
        (
            _reduce("bf16 4096x4096 last", "bf16[4096,4096]", axis=-1),
            _reduce("f16 4096x4096 last", "f16[4096,4096]", axis=-1),
            _reduce("s32 4096x4096 last", "s32[4096,4096]", axis=-1),
            _reduce("f32 apart", "f32[64,128,32,128]", axis=(0, 2)),
            _reduce("f32 vector", "f32[1000003]"),
            *_variants(
                *(_reduce(f"f32 {kind}", "f32[1024,1024]", kind=kind, axis=-1) for kind in _KINDS),
                _reduce("f32 all", "f32[4096,4096]"),
                _reduce("f32 odd last", "f32[1001,517]", axis=-1, keepdims=True),
                _reduce("f32 small", "f32[7]", kind="max"),
            ),
        ),
    ),
    "matmul": (
        (
            _matmul("bf16 1024", "bf16[1024,1024]", "bf16[1024,1024]"),
            _matmul("f32 512 highest", "f32[512,512]", "f32[512,512]", precision="highest"),
            _matmul("bf16 odd", "bf16[1000,200]", "bf16[200,1000]"),
        ),
        (
            _matmul("s8 1024", "s8[1024,1024]", "s8[1024,1024]", preferred_element_type="int32"),
            *_variants(
                unestimated(_matmul("f32 1024 highest", "f32[1024,1024]", "f32[1024,1024]", precision="highest")),
                unestimated(_matmul("bf16 2048", "bf16[2048,2048]", "bf16[2048,2048]")),
                _matmul("f16 2048", "f16[2048,2048]", "f16[2048,2048]"),
                _matmul("f32 1024", "f32[1024,1024]", "f32[1024,1024]"),
                _matmul("bf16 1 row", "bf16[1,4096]", "bf16[4096,4096]"),
                _matmul("bf16 8 rows", "bf16[8,4096]", "bf16[4096,4096]"),
                _matmul("bf16 100 rows", "bf16[100,4096]", "bf16[4096,4096]"),
                _matmul("bf16 batch", "bf16[8,1024,512]", "bf16[8,512,1024]"),
                _matmul("bf16 broadcast", "bf16[8,1024,512]", "bf16[512,1024]"),
            ),
        ),
    ),
    "attention": (
        (
            _attention("bf16 d128", "bf16", _HEADS, _HEADS),
            *_variants(
                _attention("bf16 d64 causal", "bf16", _NARROW, _NARROW, is_causal=True),
                _attention(
                    "bf16 lengths", "bf16", (4, 1000, 4, 64), (4, 1000, 4, 64),
                    arrays={"key_value_seq_lengths": "s32[4]"},
                ),
            ),
        ),
        (
            _attention("f32 d128 causal", "f32", _SHORT, _SHORT, is_causal=True),
            _attention("bf16 d256", "bf16", (1, 1024, 2, 256), (1, 1024, 2, 256), is_causal=True),
            *_variants(
                _attention("bf16 d128 causal", "bf16", _HEADS, _HEADS, is_causal=True),
                _attention("bf16 d64", "bf16", _NARROW, _NARROW),
                _attention("f16 d64", "f16", (1, 1024, 2, 64), (1, 1024, 2, 64)),
                _attention("bf16 gqa causal", "bf16", (1, 2048, 8, 128), (1, 2048, 1, 128), is_causal=True),
                _attention("bf16 window", "bf16", _HEADS, _HEADS, is_causal=True, local_window_size=512),
                _attention("bf16 soft cap", "bf16", _SHORT, _SHORT, logits_soft_cap=30.0),
                _attention("bf16 last block", "bf16", (4, 1000, 4, 64), (4, 1000, 4, 64)),
                _attention("bf16 bias", "bf16", _SHORT, _SHORT, arrays={"bias": "bf16[1,2,2048,2048]"}),
                _attention("bf16 mask", "bf16", _SHORT, _SHORT, arrays={"mask": "bool[1,1,2048,2048]"}),
                _attention(
                    "bf16 segments", "bf16", _SHORT, _SHORT,
                    arrays={"q_segment_ids": "s32[1,2048]", "kv_segment_ids": "s32[1,2048]"},
                ),
                _attention("bf16 odd", "bf16", (2, 333, 4, 96), (2, 1001, 2, 96), is_causal=True),
                _attention("bf16 values", "bf16", _SHORT, _SHORT, (1, 2048, 2, 64)),
            ),
        ),
    ),
    "chunk_fwd_h": (
        (
            _chunk("bf16 gk", "bf16", 4096),
            _chunk("bf16 packed gk", "bf16", 2048, starts=_PACKED),
        ),
        (
            _chunk("f32 gk", "f32", 4096),
            _chunk("f32 packed g", "f32", 2048, gates="g", starts=_PACKED),
            *_variants(
                _chunk("bf16 g", "bf16", 4096, gates="g"),
                _chunk("bf16 g gk gv", "bf16", 4096, gates="g gk gv"),
                _chunk("bf16 no gates", "bf16", 4096, gates=""),
                _chunk("bf16 odd", "bf16", 1000, gates="g gk"),
                _chunk("bf16 k64", "bf16", 2048, k=64, v=64),
                _chunk("bf16 k256", "bf16", 2048, k=256, v=128),
            ),
        ),
    ),
}  # fmt: skip

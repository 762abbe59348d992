"""Cases that fill at least three blocks along every axis, with odd tails, once blocks are made small.

The cases of an op are small, so that every backend can run all of them: most fit one block, and what blocks hand
over to each other, buffers and accumulators, is never touched. These cases are for that. The last axis is a multiple
of 16 bytes but of no block, so that copies by TMA are possible and end in the middle of a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from opmux.core.cases import attention_case, chunk_fwd_h
from opmux.core.cases.add import BF16, F32, random_array
from opmux.core.cases.case import Case
from opmux.core.config import Config

_SHORTEST = 16
"""Shorter blocks hand over no better, and simulators take their time for each."""


def block_cases(op: str) -> tuple[Case, ...]:
    """The cases of an op; none for one that has no entry here."""
    return _CASES.get(op, ())


def small_blocks(schema: type[Config]) -> dict[str, int]:
    """Fields of a config that make its blocks about as small as its schema allows, to override the defaults with.

    A length that must be a multiple of something becomes the first one from 16 on; counts (`num_stages`, `num_ctas`)
    become two, so that slots are handed over; thresholds that may be zero become zero, so that the path for large
    arrays is taken.
    """
    found: dict[str, int] = {}
    for name, field in schema.model_fields.items():
        at_least, at_most, step = (_bound(field.metadata, kind) for kind in ("ge", "le", "multiple_of"))
        if field.annotation is not int:
            continue
        if name.startswith("num_"):
            found[name] = min(2, at_most or 2)
        elif step:
            found[name] = min(step * -(-max(_SHORTEST, at_least or 0) // step), at_most or field.default)
        elif at_least == 0:
            found[name] = 0
    return found


def _bound(metadata: list[Any], kind: str) -> int | None:
    return next((getattr(bound, kind) for bound in metadata if hasattr(bound, kind)), None)


def _add(name: str, x: tuple[int, ...], y: tuple[int, ...], dtype: Any = F32) -> Case:
    def build(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random_array(rng, x, dtype), random_array(rng, y, dtype)), {}

    return Case(name, build)


def _matmul(name: str, a: tuple[int, ...], b: tuple[int, ...], dtype: Any = F32, **options: Any) -> Case:
    def build(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random_array(rng, a, dtype), random_array(rng, b, dtype)), options

    return Case(name, build)


def _reduce(name: str, x: tuple[int, ...], dtype: Any = F32, **options: Any) -> Case:
    def build(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random_array(rng, x, dtype),), options

    return Case(name, build)


_CASES: dict[str, tuple[Case, ...]] = {
    "add": (
        _add("blocks", (3, 35, 264), (3, 35, 264)),
        _add("blocks_row", (3, 35, 264), (264,), BF16),
    ),
    "reduce": (
        _reduce("blocks_last", (261, 300), axis=-1),
        _reduce("blocks_first", (300, 264), axis=0),
        _reduce("blocks_middle", (3, 261, 264), BF16, axis=1, kind="mean"),
        _reduce("blocks_short", (35, 9, 264), axis=1, kind="max"),
    ),
    "matmul": (
        _matmul("blocks_16_bits", (264, 264), (264, 264), BF16),
        _matmul("blocks_exact", (2, 40, 264), (264, 264), precision="highest"),
    ),
    "attention": (
        attention_case.make_case(
            "blocks_16_bits", dtype=BF16, B=1, T=264, S=280, N=2, K=1, H=64, is_causal=True,
            causal_alignment="bottom_right", return_residual=True,
            rtol=2.0**-6,  # of the residual too: its terms may be rounded to 16 bits, as they are for the output
        ),
        attention_case.make_case(
            "blocks_lengths", dtype=BF16, B=2, T=264, S=264, N=1, K=1, H=64,
            key_value_seq_lengths=[200, 264],
        ),
    ),
    "chunk_fwd_h": (
        chunk_fwd_h.make_case("blocks_16_bits", ("gk",), B=1, T=137, H=1, K=136, V=136, h0=True, dtype=BF16,
                              chunk_size=32, raw=False),
        chunk_fwd_h.make_case("blocks_ragged", ("g",), H=2, K=64, V=64, h0=True, dtype=BF16, chunk_size=32,
                              cu_seqlens=[0, 70, 70, 71, 201]),
    ),
}  # fmt: skip

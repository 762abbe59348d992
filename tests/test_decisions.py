"""What is chosen for a grid of calls on every declared device, against a table under version control.

A change of a priority or a predicate shows here as a change of the table. `python tests/test_decisions.py`
writes it anew.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from opmux import registry
from opmux.core import devices

TABLE = Path(__file__).parent / "data" / "decisions.txt"


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(dtype, length, heads, kv_heads, channels, **params):
    key = array(dtype, 1, length, kv_heads, channels)
    return "attention", (array(dtype, 1, length, heads, channels), key, key), params


def chunk(dtype, length, channels, gate="gk", **params):
    gates = {"g": (), "gk": (channels,)}[gate]
    tokens = array(dtype, 1, length, 4, channels)
    return "chunk_fwd_h", (tokens, tokens), {gate: array(jnp.float32, 1, length, 4, *gates), **params}


BF16, F16, F32, I8 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8

CALLS = {
    **{
        f"add {jnp.dtype(dtype).name}": ("add", (array(dtype, 512, 512), array(dtype, 512, 512)), {})
        for dtype in (BF16, F16, F32, I8)
    },
    **{
        f"reduce {jnp.dtype(dtype).name} axis {axis}": ("reduce", (array(dtype, 512, 512),), {"axis": axis})
        for dtype in (BF16, F16, F32)
        for axis in (0, 1)
    },
    **{
        f"matmul {jnp.dtype(dtype).name}": ("matmul", (array(dtype, 512, 512), array(dtype, 512, 512)), {})
        for dtype in (BF16, F16, F32, I8)
    },
    "matmul float32 exact": ("matmul", (array(F32, 512, 512),) * 2, {"precision": "highest"}),
    "matmul bfloat16 row": ("matmul", (array(BF16, 1, 4096), array(BF16, 4096, 4096)), {}),
    "attention bfloat16 causal": attention(BF16, 2048, 8, 8, 128, is_causal=True),
    "attention bfloat16 grouped": attention(BF16, 2048, 32, 4, 64, is_causal=True),
    "attention bfloat16 96 channels": attention(BF16, 333, 4, 4, 96),
    "attention bfloat16 capped window": attention(BF16, 2048, 8, 8, 128, local_window_size=512, logits_soft_cap=30.0),
    "attention float16": attention(F16, 2048, 8, 8, 64),
    "attention float32": attention(F32, 2048, 8, 8, 64),
    "attention float32 short": attention(F32, 16, 8, 8, 64),
    "chunk_fwd_h bfloat16": chunk(BF16, 2048, 128),
    "chunk_fwd_h bfloat16 scalar gate": chunk(BF16, 1000, 64, "g"),
    "chunk_fwd_h float32": chunk(F32, 2048, 128),
    "chunk_fwd_h bfloat16 small": chunk(BF16, 100, 16),
}


def chosen(name, device):
    """The backend of the forward, and that of the backward if it is another one."""
    op, args, params = CALLS[name]
    decision = registry.get(op, device=device).explain(*args, **params)
    backward = decision.backward.backend if decision.backward is not None else decision.backend
    return (
        decision.backend if backward == decision.backend else f"{decision.backend}, backward {backward or 'reference'}"
    )


def table():
    lines = []
    for name in CALLS:
        found = [(device, chosen(name, device)) for device in devices.names()]
        lines.append(name)
        for backend, same in groupby(sorted(found, key=lambda pair: pair[1]), key=lambda pair: pair[1]):
            lines.append(f"    {backend or 'nothing':32} {' '.join(sorted(device for device, _ in same))}")
    return "\n".join(lines) + "\n"


@pytest.mark.usefixtures("isolated_registry")
def test_F13_decisions_are_those_of_the_table():
    assert table().splitlines() == TABLE.read_text().splitlines(), "the table is written by running this file"


if __name__ == "__main__":
    TABLE.write_text(table())

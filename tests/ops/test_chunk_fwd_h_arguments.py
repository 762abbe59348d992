"""What `chunk_fwd_h` refuses, and what it says then."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from opmux import registry
from opmux.core.errors import ArgumentError, ArgumentTypeError

K, V = np.ones((2, 37, 3, 4), np.float32), np.ones((2, 37, 3, 5), np.float32)
K1, V1 = K[:1], V[:1]
REFUSED = [
    ("k", (K[0], V), {}, "B, T, H, K"),
    ("k", (K.astype(int), V), {}, "floating"),
    ("k", ("k", V), {}, "array"),
    ("v", (K, V[:, :5]), {}, "time before heads"),
    ("v", (K, V[..., 0]), {}, "2, 37, 3, V"),
    ("v", (K, V.transpose(0, 2, 1, 3)), {}, "time before heads"),
    ("v", (K.transpose(0, 2, 1, 3), V), {}, "look like heads before time"),
    ("g", (K, V, K), {}, r"\[2, 37, 3\]"),
    ("g", (K, V, K[..., 0].transpose(0, 2, 1)), {}, "time before heads"),
    ("g_gamma", (K, V), {"g_gamma": np.ones(2, np.float32)}, r"\[3\]"),
    ("g_gamma", (K, V), {"g_gamma": np.ones(3, int)}, "floating"),
    ("gk", (K, V), {"gk": V}, r"\[2, 37, 3, 4\]"),
    ("gv", (K, V), {"gv": K}, r"\[2, 37, 3, 5\]"),
    ("h0", (K, V), {"h0": np.ones((1, 3, 4, 5), np.float32)}, r"\[2, 3, 4, 5\]"),
    ("h0", (K, V), {"h0": np.ones((2, 3, 5, 4), np.float32)}, r"not \[V, K\]"),
    ("h0", (K1, V1), {"h0": np.ones((1, 3, 4, 5), np.float32), "cu_seqlens": [0, 5, 37]}, "number of sequences"),
    ("cu_seqlens", (K, V), {"cu_seqlens": [0, 37, 74]}, "batch of one"),
    ("cu_seqlens", (K1, V1), {"cu_seqlens": [0, 12, 8, 37]}, "never decrease"),
    ("cu_seqlens", (K1, V1), {"cu_seqlens": [1, 12, 37]}, "start at 0"),
    ("cu_seqlens", (K1, V1), {"cu_seqlens": [0, 12, 36]}, "end at T, which is 37"),
    ("cu_seqlens", (K1, V1), {"cu_seqlens": [0, 12, 38]}, "end at T, which is 37"),
    ("cu_seqlens", (K1, V1), {"cu_seqlens": []}, r"N \+ 1"),
    ("cu_seqlens", (K1, V1), {"cu_seqlens": [[0, 37]]}, r"N \+ 1"),
    ("cu_seqlens", (K1, V1), {"cu_seqlens": np.asarray([0.0, 37.0])}, "integer"),
    ("chunk_size", (K, V), {"chunk_size": 0}, "positive"),
    ("chunk_size", (K, V), {"chunk_size": -16}, "positive"),
    ("chunk_size", (K, V), {"chunk_size": 16.0}, "positive Python int"),
    ("chunk_size", (K, V), {"chunk_size": True}, "positive Python int"),
    ("split_size", (K, V), {"split_size": 96}, "multiple of chunk_size, which is 64"),
    ("split_size", (K, V), {"split_size": 0}, "positive"),
    ("gates", (K, V), {"gates": "log2"}, "'cumulative' or 'raw'"),
    ("output_final_state", (K, V), {"output_final_state": 1}, "True or False"),
    ("states_in_fp32", (K, V), {"states_in_fp32": "yes"}, "True or False"),
    ("head_first", (K, V), {"head_first": True}, "unknown keyword"),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "args", "kwargs", "says"), REFUSED, ids=[row[0] for row in REFUSED])
def test_refused_arguments(argument, args, kwargs, says):
    with pytest.raises(ArgumentError, match=says) as caught:
        registry.get("chunk_fwd_h")(*args, **kwargs)
    assert caught.value.argument == argument
    assert argument in str(caught.value)
    assert isinstance(caught.value, ArgumentTypeError) == (
        says in {"floating", "array", "integer", "positive Python int", "True or False", "unknown keyword"}
    )


def test_refused_offsets_under_tracing():
    op = registry.get("chunk_fwd_h")
    for cu_seqlens, says in ((np.zeros((2, 2), np.int32), r"N \+ 1"), (np.zeros(2, np.float32), "integer")):
        with pytest.raises(ArgumentError, match=says):
            jax.jit(lambda cu_seqlens: op(K1, V1, cu_seqlens=cu_seqlens))(cu_seqlens)

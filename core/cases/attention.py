"""Cases of `attention`: the conventions on which libraries disagree, and the reports of their users.

Cases of the causal conventions come in pairs. Sizes are small but odd; the cases named `blocks_*` and those
like them are long enough for several blocks on both sequence axes, with a tail.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from opmux.core.cases.attention_case import (
    BF16,
    F16,
    F32,
    Arrays,
    Edit,
    assign,
    cast,
    chain,
    make_case,
    random_bias,
    random_mask,
)
from opmux.core.cases.case import Case

ALIGNMENTS = ("top_left", "bottom_right")


def cases() -> list[Case]:
    """Every case."""
    return [*_shapes(), *_dtypes(), *_masks(), *_biases(), *_bands(), *_lengths(), *_segments(), *_not_finite()]


def _shapes() -> Iterator[Case]:
    yield make_case("plain")
    yield make_case("longer_keys", T=5, S=19, source="jax#24491", grad=False)
    yield make_case("ones", B=1, T=1, S=1, N=1, K=1, H=1)
    yield make_case("decode", B=3, T=1, S=23)
    yield make_case("mqa", N=5, K=1, source="jax#24102")
    yield make_case("gqa_groups_are_adjacent", _heads_apart, N=6, K=3, source="jax-js#180; onnx#7274; flax#5177")
    yield make_case("gqa_ratio_is_not_heads", N=6, K=2, source="native-sparse-attention-triton#27")
    yield make_case("value_wider", H=12, Hv=20, source="jax#26676; maxtext#1047")
    yield make_case("value_narrower", H=20, Hv=12, grad=False, source="native-sparse-attention-triton#27")
    yield make_case("scale", scale=0.3, grad=False)
    yield make_case("scale_zero", scale=0.0)
    yield make_case("residual", T=7, S=9, return_residual=True)
    yield make_case("rank_3", _rank_3, B=1, grad=False)
    yield make_case("rank_3_with_all", chain(random_mask(1, 4, 5, 7), _rank_3), B=1, return_residual=True,
                    query_seq_lengths=[4], key_value_seq_lengths=[6],
                    q_segment_ids=[[0, 0, 0, 1, 1]], kv_segment_ids=[[0, 0, 0, 1, 1, 1, 1]])  # fmt: skip
    yield make_case("everything", chain(random_mask(2, 1, 1, 7), random_bias(1, 4, 5, 7)), Hv=5, scale=0.4,
                    is_causal=True, local_window_size=(3, None), causal_alignment="bottom_right", logits_soft_cap=2.0,
                    query_seq_lengths=[5, 4], key_value_seq_lengths=[7, 6], return_residual=True, transforms=True,
                    q_segment_ids=[[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]],
                    kv_segment_ids=[[0, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1, 1]])  # fmt: skip
    yield make_case("blocks_odd", B=1, T=37, S=131, N=2, K=1, H=20, source="jax#23819; jax#27224")
    yield make_case("blocks_several", B=1, T=417, S=535, N=2, K=1, H=16, grad=False, source="jax#31395")
    yield make_case("blocks_causal", B=1, T=417, S=397, N=1, K=1, H=16, is_causal=True, return_residual=True)
    yield make_case("blocks_window", B=1, T=300, S=420, N=1, K=1, is_causal=True, local_window_size=(40, None),
                    causal_alignment="bottom_right")  # fmt: skip
    yield make_case("empty_batch", B=0, return_residual=True)
    yield make_case("empty_queries", T=0, return_residual=True)
    yield make_case("empty_keys", S=0, return_residual=True)
    yield make_case("empty_keys_and_masks", chain(_mask_empty, random_bias(1, 4, 5, 0)), S=0)
    yield make_case("empty_query_heads", N=0, K=1)
    yield make_case("empty_head_dim", H=0, Hv=3)
    yield make_case("empty_value_dim", Hv=0, return_residual=True)


def _heads_apart(rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["value"] += 10 * np.arange(arrays["value"].shape[2], dtype=F32)[:, None]


def _rank_3(rng: np.random.Generator, arrays: Arrays) -> None:
    for name in ("query", "key", "value"):
        arrays[name] = arrays[name][0]


def _mask_empty(rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["mask"] = np.ones((2, 1, 5, 0), bool)


def _dtypes() -> Iterator[Case]:
    for dtype in (BF16, F16):
        yield make_case(f"{dtype.name}", dtype=dtype, T=9, S=11, is_causal=True, return_residual=True)
        yield make_case(f"{dtype.name}_bias_float32", random_bias(1, 4, 5, 7), dtype=dtype, source="jax#32242")
        yield make_case(f"{dtype.name}_bias_same", random_bias(2, 1, 5, 7, dtype=dtype), dtype=dtype, grad=False)
        yield make_case(f"{dtype.name}_soft_cap", dtype=dtype, logits_soft_cap=2.0, grad=False)
    yield make_case("float32_bias_bfloat16", random_bias(1, 4, 1, 7, dtype=BF16))
    yield make_case("mixed_query_bfloat16", cast(query=BF16))
    yield make_case("mixed_key_and_value", cast(key=BF16, value=F16))
    yield make_case("int64_lengths", cast(query_seq_lengths=np.int64, key_value_seq_lengths=np.uint8),
                    query_seq_lengths=[5, 2], key_value_seq_lengths=[3, 7], grad=False)  # fmt: skip
    # One step of float32 in a score of 28,800 is 2e-3, and the score is an exponent.
    yield make_case(
        "float16_scores_above_65504", _large_scores, dtype=F16, H=64, grad=False, rtol=2e-2, source="jax#24047"
    )
    yield make_case(
        "bfloat16_sum_above_256", _flat_scores, B=1, T=3, S=512, N=1, K=1, dtype=BF16, source="maxtext#1225"
    )


def _large_scores(rng: np.random.Generator, arrays: Arrays) -> None:
    for name in ("query", "key"):
        arrays[name] = (60 + arrays[name] / 4).astype(F16)


def _flat_scores(rng: np.random.Generator, arrays: Arrays) -> None:
    arrays["query"] *= BF16.type(0.01)
    arrays["value"] += BF16.type(1)


def _masks() -> Iterator[Case]:
    shapes = {
        "full": (2, 4, 5, 7), "per_batch": (2, 1, 5, 7), "per_head": (1, 4, 5, 7), "shared": (1, 1, 5, 7),
        "padding": (2, 1, 1, 7), "rank_2": (5, 7), "rank_1": (7,),
    }  # fmt: skip
    for name, shape in shapes.items():
        yield make_case(f"mask_{name}", random_mask(*shape), grad=name == "padding")
    yield make_case("mask_query_rows", assign("mask", (0, 0, 2), False, random_mask(2, 4, 5, 1)))
    yield make_case("mask_scalar", random_mask(1, 1, 1, 1), grad=False)
    yield make_case("mask_row_empty", assign("mask", (..., 2, slice(None)), False, random_mask(1, 2, 4, 4)),
                    B=1, T=4, S=4, N=2, transforms=True, return_residual=True,
                    source="pytorch#103963; mlx#2608; equinox#274; pytorch#41508; flash-attention#2562")  # fmt: skip
    yield make_case("mask_all_empty", assign("mask", ..., False, random_mask(2, 1, 5, 7)), return_residual=True)
    yield make_case("mask_gqa_padding_same_sizes", random_mask(2, 1, 1, 7), N=8, K=2, source="mlx-lm#1467; jax#28974")
    yield make_case("mask_and_bias_per_head", chain(random_mask(1, 6, 5, 7), random_bias(1, 6, 5, 7)), N=6, K=2,
                    source="pytorch#177482; jax#24102")  # fmt: skip
    yield make_case(
        "mask_and_window", random_mask(2, 1, 5, 7), local_window_size=(2, 1), grad=False, source="jax2onnx#217"
    )
    yield make_case("mask_left_padding_causal", assign("mask", (1, ..., slice(0, 3)), False, random_mask(2, 1, 1, 5)),
                    T=5, S=5, is_causal=True, return_residual=True, source="burn#4697; pytorch#41508")  # fmt: skip


def _biases() -> Iterator[Case]:
    shapes = {
        "full": (2, 4, 5, 7), "per_batch": (2, 1, 5, 7), "per_head": (1, 4, 5, 7), "keys": (2, 1, 1, 7),
        "rows": (1, 4, 5, 1), "rank_2": (5, 7), "rank_0": (),
    }  # fmt: skip
    for name, shape in shapes.items():
        yield make_case(f"bias_{name}", random_bias(*shape), grad=name not in ("per_batch", "rank_2"),
                        source="jax#27184; jax#30593; attention-gym#20")  # fmt: skip
    yield make_case("bias_row_of_minus_inf", _minus_inf_row, T=4, S=6, return_residual=True,
                    source="iree#24175; TransformerEngine#556; pytorch#41508")  # fmt: skip
    yield make_case("bias_of_lowest", assign("bias", (..., slice(4, None)), np.finfo(F32).min, random_bias(2, 1, 5, 7)))
    # A row of nothing but the lowest number is the flat row that the float32 sum makes of it.
    flat = assign("bias", (..., 1, slice(None)), np.finfo(F32).min, random_bias(2, 1, 5, 7))
    yield make_case("bias_row_of_lowest", flat, grad=False)
    yield make_case(
        "bias_blocks", chain(random_bias(1, 2, 37, 131), random_mask(1, 1, 37, 131)), B=1, T=37, S=131, N=2, K=1
    )
    yield make_case(
        "soft_cap_before_mask", logits_soft_cap=1.0, is_causal=True, source="flash-attention#1025; onnx#7865"
    )
    yield make_case("soft_cap_before_bias", random_bias(1, 4, 5, 7), logits_soft_cap=1.5, source="onnx#7867")
    yield make_case("soft_cap_after_scale", scale=4.0, logits_soft_cap=3.0, return_residual=True,
                    source="sgl-kernel-xpu#491")  # fmt: skip


def _minus_inf_row(rng: np.random.Generator, arrays: Arrays) -> None:
    bias = rng.standard_normal((1, 1, 4, 6)).astype(F32)
    bias[:, :, 1] = -np.inf
    bias[:, :, 3, ::2] = -np.inf
    arrays["bias"] = bias


def _bands() -> Iterator[Case]:
    sizes = {"square": (6, 6), "decode": (1, 8), "wide": (2, 5), "tall": (5, 2), "one_key": (4, 1)}
    sources = {
        "decode": "pytorch#103082; flash-attention#282; jax#24830", "wide": "flash-attention#517; mlx#2835",
        "tall": "flash-attention#1778; pytorch#108108",
    }  # fmt: skip
    for alignment in ALIGNMENTS:
        for name, (T, S) in sizes.items():
            yield make_case(f"causal_{name}_{alignment}", T=T, S=S, is_causal=True, causal_alignment=alignment,
                            return_residual=name == "tall", source=sources.get(name, ""),
                            grad=name == "tall")  # fmt: skip
        yield make_case(f"window_alone_{alignment}", T=8, S=10, local_window_size=(0, 2), causal_alignment=alignment,
                        source="jax#32300")  # fmt: skip
        yield make_case(
            f"window_tall_{alignment}", T=9, S=4, local_window_size=1, causal_alignment=alignment, grad=False
        )
        yield make_case(f"window_causal_{alignment}", T=8, S=8, is_causal=True, local_window_size=(2, 0),
                        causal_alignment=alignment,
                        source="transformers#39408; onnxruntime#25927; vllm#3385")  # fmt: skip
        yield make_case(
            f"window_left_{alignment}", T=6, S=9, local_window_size=(2, None), causal_alignment=alignment, grad=False
        )
        yield make_case(
            f"window_right_{alignment}", T=6, S=9, local_window_size=(None, 1), causal_alignment=alignment, grad=False
        )
        yield make_case(
            f"window_zero_{alignment}", T=6, S=9, local_window_size=0, causal_alignment=alignment, grad=False
        )
        yield make_case(f"lengths_causal_{alignment}", B=4, T=6, S=8, is_causal=True, causal_alignment=alignment,
                        query_seq_lengths=[6, 2, 4, 3], key_value_seq_lengths=[8, 5, 2, 0],
                        return_residual=True)  # fmt: skip
        yield make_case(f"lengths_window_{alignment}", B=3, T=6, S=8, local_window_size=(1, 2),
                        causal_alignment=alignment, query_seq_lengths=[6, 3, 1],
                        key_value_seq_lengths=[3, 8, 6])  # fmt: skip
    yield make_case("window_open", local_window_size=(None, None), grad=False)
    yield make_case("window_wider_than_all", local_window_size=(100, 100), grad=False)
    yield make_case("causal_ignores_window_right", is_causal=True, local_window_size=(1, 3), grad=False)
    yield make_case("causal_gqa_residual", N=6, K=2, T=9, S=9, is_causal=True, return_residual=True)


def _lengths() -> Iterator[Case]:
    yield make_case("lengths_of_keys", B=4, T=6, S=16, key_value_seq_lengths=[3, 16, 1, 9], source="jax#23349")
    yield make_case("lengths_of_queries", B=3, T=6, query_seq_lengths=[6, 0, 3], return_residual=True,
                    source="jax#22516; flash-attention#1661")  # fmt: skip
    yield make_case("lengths_of_no_keys", B=3, S=6, key_value_seq_lengths=[6, 0, 2], return_residual=True,
                    source="flashinfer#4484; pytorch#81077; flash-attention#1155")  # fmt: skip
    yield make_case("lengths_both", B=3, query_seq_lengths=[5, 2, 0], key_value_seq_lengths=[4, 7, 5], grad=False)
    yield make_case("lengths_blocks", B=2, T=37, S=131, N=2, K=1, query_seq_lengths=[37, 20],
                    key_value_seq_lengths=[97, 130], is_causal=True, causal_alignment="bottom_right")  # fmt: skip


def _segments() -> Iterator[Case]:
    yield make_case("segments", q_segment_ids=[[0, 0, 1, 1, 1], [3, 3, 3, 3, 7]],
                    kv_segment_ids=[[0, 0, 0, 1, 1, 1, 1], [3, 7, 3, 7, 3, 7, 3]])  # fmt: skip
    # Segments 1 and 4 have no keys, segment 2 no queries.
    yield make_case("segments_empty", q_segment_ids=[[0, 1, 1, 3, 4], [0, 0, 0, 0, 0]], return_residual=True,
                    kv_segment_ids=[[0, 0, 2, 2, 3, 3, 3], [9, 9, 9, 9, 9, 9, 9]])  # fmt: skip
    yield make_case("segments_causal", B=1, T=9, S=9, is_causal=True, q_segment_ids=[[0, 0, 0, 0, 1, 1, 2, 2, 2]],
                    kv_segment_ids=[[0, 0, 0, 0, 1, 1, 2, 2, 2]])  # fmt: skip
    yield make_case("segments_blocks", _packed, B=1, T=131, S=131, N=2, K=1, is_causal=True)


def _packed(rng: np.random.Generator, arrays: Arrays) -> None:
    ids = np.repeat(np.arange(5, dtype=np.int32), [40, 1, 37, 0, 53])[None]
    arrays["q_segment_ids"] = arrays["kv_segment_ids"] = ids


def _not_finite() -> Iterator[Case]:
    # Hidden: nothing of it may show, neither in outputs nor in gradients.
    for name, bad in (("nan", np.nan), ("inf", np.inf)):
        padding = chain(*(assign(array, (1, slice(5, None)), bad) for array in ("key", "value")))
        yield make_case(f"{name}_in_padded_keys", padding, T=8, S=8, key_value_seq_lengths=[8, 5], return_residual=True,
                        source="pytorch#101967; flash-linear-attention#892")  # fmt: skip
        yield make_case(
            f"{name}_in_padded_queries",
            assign("query", (1, slice(3, None)), bad),
            query_seq_lengths=[5, 3],
            grad=name == "nan",
        )
        yield make_case(f"{name}_under_mask", _hidden_by_mask(bad), grad=name == "nan")
        yield make_case(f"{name}_under_minus_inf", _hidden_by_bias(bad), grad=name == "nan")
    yield make_case("nan_in_future", chain(assign("key", (0, 4), np.nan), assign("value", (1, 5), np.nan)), T=4,
                    is_causal=True)  # fmt: skip
    yield make_case("nan_outside_window", chain(assign("key", (0, 0), np.nan), assign("value", (0, 6), np.nan)),
                    T=7, local_window_size=(2, 1), grad=False)  # fmt: skip
    # Seen: the user's own NaN shows in exactly the rows (and for values the columns) that see it.
    yield make_case("nan_seen_in_query", assign("query", (0, 2, 1, 3), np.nan), grad=False, return_residual=True)
    yield make_case("nan_seen_in_key", assign("key", (0, 3, 1, 2), np.nan), T=7, is_causal=True, grad=False,
                    return_residual=True)  # fmt: skip
    yield make_case("nan_seen_in_value", assign("value", (1, 3, 0, 2), np.nan), T=7, is_causal=True, grad=False,
                    return_residual=True)  # fmt: skip
    yield make_case("nan_seen_in_bias", assign("bias", (0, 1, 2, 3), np.nan, random_bias(1, 4, 5, 7)), grad=False)


def _hidden_by_mask(bad: float) -> Edit:
    def edit(rng: np.random.Generator, arrays: Arrays) -> None:
        random_mask(2, 1, 5, 7)(rng, arrays)
        arrays["mask"][..., 3] = False
        arrays["mask"][0, :, 2] = False
        arrays["key"][:, 3] = arrays["value"][:, 3] = bad
        arrays["query"][0, 2] = bad
        random_bias(2, 4, 5, 7)(rng, arrays)
        arrays["bias"][~np.broadcast_to(arrays["mask"], (2, 4, 5, 7))] = bad

    return edit


def _hidden_by_bias(bad: float) -> Edit:
    def edit(rng: np.random.Generator, arrays: Arrays) -> None:
        random_bias(1, 1, 5, 7)(rng, arrays)
        arrays["bias"][..., 3] = -np.inf
        arrays["key"][:, 3] = arrays["value"][:, 3] = bad

    return edit

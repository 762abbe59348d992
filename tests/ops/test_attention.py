"""`attention`: the specification against the oracle, and what the op refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core.cases.attention import cases
from opmux.core.errors import ArgumentError, ArgumentTypeError, OpmuxError
from opmux.core.ops.attention import OP
from opmux.testing import Subject, check_gradients
from opmux.testing.conformance import check_numerics
from opmux.testing.oracle.attention import attention as oracle

REFERENCE = Subject.reference(OP)
CASES = {case.name: case for case in cases()}


def call(*args, **kwargs):
    return REFERENCE.run(*args, **kwargs)


def arrays(B=2, T=5, S=7, N=4, K=2, H=8, Hv=8, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, Hv))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


# The oracle itself, by hand.


def test_oracle_of_one_key_is_its_value():
    query, key, value = arrays(S=1)
    np.testing.assert_array_equal(oracle(query, key, value), np.repeat(value, 5, 1)[:, :, [0, 0, 1, 1]])


def test_oracle_of_equal_scores_is_the_mean():
    query, key, value = arrays(N=2)
    out, lse = oracle(0 * query, key, value, return_residual=True)
    np.testing.assert_allclose(out, np.broadcast_to(value.mean(1, keepdims=True), out.shape), atol=1e-6)
    np.testing.assert_allclose(lse, np.log(7))


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"is_causal": True}, ["0", "01"]),
        ({"is_causal": True, "causal_alignment": "bottom_right"}, ["0123", "01234"]),
        ({"local_window_size": 1}, ["01", "012"]),
        ({"local_window_size": (0, 2), "causal_alignment": "bottom_right"}, ["34", "4"]),
        ({"local_window_size": (1, None)}, ["01234", "01234"]),
        ({"is_causal": True, "local_window_size": (0, 5)}, ["0", "1"]),
        ({"key_value_seq_lengths": [3]}, ["012", "012"]),
        ({"key_value_seq_lengths": [3], "is_causal": True, "causal_alignment": "bottom_right"}, ["01", "012"]),
        ({"query_seq_lengths": [1], "is_causal": True, "causal_alignment": "bottom_right"}, ["01234", ""]),
        ({"q_segment_ids": [[0, 1]], "kv_segment_ids": [[0, 1, 1, 0, 2]]}, ["03", "12"]),
    ],
)
def test_conventions_by_hand(options, kept):
    """Which keys each of two rows sees, read off equal scores and one-hot values; the same of oracle and op."""
    query, key = np.zeros((1, 2, 1, 3), np.float32), np.zeros((1, 5, 1, 3), np.float32)
    value = np.eye(5, dtype=np.float32)[None, :, None]
    given = {name: np.array(option) if isinstance(option, list) else option for name, option in options.items()}
    for run in (oracle, call):
        out = np.asarray(run(query, key, value, **given))[0, :, 0]
        assert ["".join(str(s) for s in range(5) if row[s] > 0) for row in out] == kept


# The specification against the oracle.

# A few cases without any registry: the `xla` backend, which is the specification compiled, goes through all of them.
SPECIFIED = [
    "everything", "rank_3_with_all", "blocks_odd", "empty_keys", "bfloat16_bias_float32", "float16_scores_above_65504",
    "bias_row_of_minus_inf", "segments_empty", "nan_seen_in_value",
]  # fmt: skip


@pytest.mark.parametrize("name", SPECIFIED)
def test_reference_without_a_registry(name):
    check_numerics(REFERENCE, CASES[name])


@pytest.mark.parametrize("name", ["everything", "mask_row_empty", "bias_row_of_minus_inf", "nan_in_padded_keys"])
def test_gradients_of_the_reference(name):
    check_gradients(REFERENCE, CASES[name])


@pytest.mark.parametrize("name", ["mask_row_empty", "bias_row_of_minus_inf", "lengths_of_no_keys", "nan_under_mask"])
def test_gradients_of_what_is_hidden_are_exactly_zero(name):
    args, kwargs = CASES[name].arguments()
    kwargs["return_residual"] = True
    _, lse = oracle(*args, **kwargs)
    empty = np.isneginf(lse)
    assert empty.any() or name == "nan_under_mask"

    def loss(*args):
        out, lse = call(*args, **kwargs)
        return out.sum() + jnp.where(empty, 0, lse).sum()

    query, key, value = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*args)
    assert not np.asarray(query)[empty].any()
    for primal, cotangent in zip(args, (query, key, value), strict=True):
        assert not np.asarray(cotangent)[~np.isfinite(primal)].any()
        assert np.isfinite(cotangent).all()


def test_outputs_are_declared_for_every_case():
    for case in cases():
        request = OP.request(*case.arguments())
        declared = OP.outputs(request)
        traced = jax.eval_shape(lambda operands, request=request: OP.reference(request, operands), request.structs())
        for name in request.wanted:
            assert (traced[name].shape, traced[name].dtype) == (declared[name].shape, declared[name].dtype), case.name


def test_request_is_the_same_of_arrays_and_of_shapes():
    for case in cases():
        args, kwargs = case.arguments()
        assert OP.request(args, kwargs) == OP.call(args, kwargs).request, case.name


def test_cost_counts_what_the_band_keeps():
    query, key, value = arrays(B=1, T=8, S=8, N=1, K=1, H=4, Hv=4)

    def pairs(**options):
        return OP.cost(OP.request((query, key, value), options)).flops / (2 * (4 + 4))

    assert pairs() == 64
    assert pairs(is_causal=True) == 36
    assert pairs(local_window_size=0) == 8
    assert OP.cost(OP.request((query, key, value), {})).bytes == 4 * 4 * 8 * 4


# What it refuses. Each message names the argument, what was given, what is allowed.


def bad(argument, *words, type_=False, sizes=None, **options):
    given = dict(zip(("query", "key", "value"), arrays(**(sizes or {})), strict=True)) | options
    with pytest.raises(ArgumentTypeError if type_ else ArgumentError) as caught:
        OP.call((), given)
    assert isinstance(caught.value, OpmuxError)
    assert not isinstance(caught.value, NotImplementedError)
    assert caught.value.argument == argument
    assert caught.value.allowed
    for word in words:
        assert word in str(caught.value)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("argument", "words", "options"),
    [
        ("query", ["(2, 5)", "[B, T, N, H]"], {"query": zeros(2, 5)}),
        ("query", ["(1, 2, 5, 4, 8)"], {"query": zeros(1, 2, 5, 4, 8)}),
        ("key", ["(7, 2, 8)"], {"key": zeros(7, 2, 8)}),
        ("key", ["(3, 7, 2, 8)", "[2, S, K, 8]"], {"key": zeros(3, 7, 2, 8)}),
        ("key", ["(2, 7, 2, 9)"], {"key": zeros(2, 7, 2, 9)}),
        ("value", ["(2, 6, 2, 8)", "[2, 7, 2, Hv]"], {"value": zeros(2, 6, 2, 8)}),
        ("value", ["(2, 7, 1, 8)"], {"value": zeros(2, 7, 1, 8)}),
        ("key", ["3 heads for 4", "sequence before heads"], {"key": zeros(2, 7, 3, 8), "value": zeros(2, 7, 3, 8)}),
        ("key", ["0 heads"], {"key": zeros(2, 7, 0, 8), "value": zeros(2, 7, 0, 8)}),
        ("mask", ["(2, 5, 7)", "[2, 1, 5, 7]", "[1, 4, 5, 7]"], {"mask": zeros(2, 5, 7, dtype=bool)}),
        ("bias", ["(4, 5, 7)", "[2, 1, 5, 7]", "[1, 4, 5, 7]"], {"bias": zeros(4, 5, 7)}),
        ("mask", ["(2, 3, 5, 7)", "(2, 4, 5, 7)"], {"mask": zeros(2, 3, 5, 7, dtype=bool)}),
        ("bias", ["(1, 2, 1, 5, 7)"], {"bias": zeros(1, 2, 1, 5, 7)}),
        ("bias", ["(2, 4, 5, 6)"], {"bias": zeros(2, 4, 5, 6)}),
        ("query_seq_lengths", ["(3,)", "[2]"], {"query_seq_lengths": zeros(3, dtype=np.int32)}),
        ("key_value_seq_lengths", ["(2, 1)"], {"key_value_seq_lengths": zeros(2, 1, dtype=np.int32)}),
        ("key_value_seq_lengths", ["()"], {"key_value_seq_lengths": np.int32(3)}),
        ("kv_segment_ids", ["None", "both"], {"q_segment_ids": zeros(2, 5, dtype=np.int32)}),
        ("q_segment_ids", ["None", "both"], {"kv_segment_ids": zeros(2, 7, dtype=np.int32)}),
        ("q_segment_ids", ["(2, 7)", "[2, 5]"],
         {"q_segment_ids": zeros(2, 7, dtype=np.int32), "kv_segment_ids": zeros(2, 7, dtype=np.int32)}),
        ("kv_segment_ids", ["(7,)", "[2, 7]"],
         {"q_segment_ids": zeros(2, 5, dtype=np.int32), "kv_segment_ids": zeros(7, dtype=np.int32)}),
        ("logits_soft_cap", ["0.0", "positive"], {"logits_soft_cap": 0.0}),
        ("logits_soft_cap", ["-1.0"], {"logits_soft_cap": -1}),
        ("logits_soft_cap", ["nan"], {"logits_soft_cap": float("nan")}),
        ("causal_alignment", ["'bottom'", "'top_left' or 'bottom_right'"], {"causal_alignment": "bottom"}),
        ("local_window_size", ["-1", "None for no bound"], {"local_window_size": -1}),
        ("local_window_size", ["(-1, 0)"], {"local_window_size": (-1, 0)}),
        ("local_window_size", ["(1, 2, 3)", "(left, right)"], {"local_window_size": (1, 2, 3)}),
        ("local_window_size", ["1.5"], {"local_window_size": 1.5}),
        ("local_window_size", ["True"], {"local_window_size": True}),
    ],
)  # fmt: skip
def test_refuses_values(argument, words, options):
    bad(argument, *words, **options)


@pytest.mark.parametrize(
    ("argument", "words", "options"),
    [
        ("query", ["int32", "floating"], {"query": zeros(2, 5, 4, 8, dtype=np.int32)}),
        ("key", ["bool"], {"key": zeros(2, 7, 2, 8, dtype=bool)}),
        ("value", ["complex64"], {"value": zeros(2, 7, 2, 8, dtype=np.complex64)}),
        ("query", ["a list"], {"query": [[[[1.0]]]]}),
        ("mask", ["float32", "`bias`"], {"mask": zeros(1, 1, 5, 7)}),
        ("mask", ["int32"], {"mask": zeros(1, 1, 5, 7, dtype=np.int32)}),
        ("bias", ["boolean", "`mask`"], {"bias": zeros(1, 1, 5, 7, dtype=bool)}),
        ("bias", ["int32"], {"bias": zeros(1, 1, 5, 7, dtype=np.int32)}),
        ("bias", ["a list"], {"bias": [[0.0]]}),
        ("query_seq_lengths", ["float32", "integer"], {"query_seq_lengths": zeros(2)}),
        ("query_seq_lengths", ["a tuple"], {"query_seq_lengths": (1, 2)}),
        ("q_segment_ids", ["float32"], {"q_segment_ids": zeros(2, 5), "kv_segment_ids": zeros(2, 7)}),
        ("scale", ["a str"], {"scale": "1"}),
        ("scale", ["a bool"], {"scale": True}),
        ("logits_soft_cap", ["a str"], {"logits_soft_cap": "30"}),
        ("is_causal", ["a int", "True or False"], {"is_causal": 1}),
        ("is_causal", ["a str"], {"is_causal": "yes"}),
        ("return_residual", ["a NoneType"], {"return_residual": None}),
        ("is_casual", ["unknown", "is_causal"], {"is_casual": True}),
    ],
)  # fmt: skip
def test_refuses_types(argument, words, options):
    bad(argument, *words, type_=True, **options)


def test_refuses_a_traced_scale():
    with pytest.raises(ArgumentTypeError, match="multiplied into an operand"):
        jax.jit(lambda scale: call(*arrays(), scale=scale))(2.0)


def test_refuses_a_call_without_value():
    with pytest.raises(ArgumentTypeError, match="value"):
        OP.call(arrays()[:2], {})


@pytest.mark.parametrize(
    ("name", "lengths", "limit"),
    [
        ("query_seq_lengths", [5, 6], 5), ("query_seq_lengths", [-1, 2], 5),
        ("key_value_seq_lengths", [8, 1], 7), ("key_value_seq_lengths", [0, -3], 7),
    ],
)  # fmt: skip
def test_refuses_lengths_out_of_range(name, lengths, limit):
    query, key, value = arrays()
    shapes = {"query": query.shape, "key": key.shape, "value": value.shape, name: (2,)}
    with pytest.raises(ArgumentError, match=f"0 to {limit}") as caught:
        OP.check_values({name: np.array(lengths)}, shapes)
    assert str(lengths) in str(caught.value)
    assert caught.value.argument == name
    OP.check_values({name: np.array([0, limit])}, shapes)


def test_heads_before_sequence_is_told_the_layout():
    """[B, N, T, H] arrays have legal shapes unless the heads give them away; then the message says the order."""
    query, key, value = arrays(T=4, S=6, N=6, K=6)
    with pytest.raises(ArgumentError, match="sequence before heads"):
        OP.call((query, key.swapaxes(1, 2)[:, :, :4], value.swapaxes(1, 2)[:, :, :4]), {})
    assert "sequence before heads" in OP.canonicalize.__doc__


def test_forward_mode_keeps_hidden_nan_out():
    query, key, value = arrays(B=1, T=6, S=6, N=2)
    key[:, 4:], value[:, 4:] = np.nan, np.inf
    moved = tuple(np.ones_like(array) for array in (query, key, value))

    def run(*given):
        return call(*given, is_causal=True)

    out, tangent = jax.jvp(run, (query, key, value), moved)
    clean = (query[:, :4], key[:, :4], value[:, :4])
    want, wanted = jax.jvp(run, clean, tuple(np.ones_like(array) for array in clean))
    np.testing.assert_allclose(out[:, :4], want, rtol=1e-5)
    np.testing.assert_allclose(tangent[:, :4], wanted, rtol=1e-4, atol=1e-5)
    assert np.isnan(out[:, 4:]).all()
    assert np.isnan(tangent[:, 4:]).all()

"""The kit catches what it is there to catch: each break of `attention` below fails the check that is named."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.custom_batching import custom_vmap

from opmux.core.cases.attention import cases
from opmux.core.ops.attention import OP
from opmux.testing import (
    TRANSFORMS,
    Subject,
    check_gradients,
    check_numerics,
    check_sensitivity,
    check_shard_map,
    find_oracle,
    transform_cases,
)  # fmt: skip
from opmux.testing.case_call import batch_of
from opmux.testing.subject import arguments, run_reference

CASES = {case.name: case for case in cases()}
GOOD = Subject.reference(OP)


def broken(change):
    """Attention whose output passes through `change(out, arguments)`."""

    def run(*args, **kwargs):
        arguments = OP.bind(args, kwargs).arguments
        results = GOOD.run(*args, **kwargs)
        return jax.tree.map(lambda leaf: change(leaf, arguments), results)

    return subject(run)


def subject(run):
    """A subject that is judged by the oracle of attention."""
    return Subject(OP, run, find_oracle("attention"))


def without(*names):
    """Attention that ignores some arguments."""

    def run(**arguments):
        return GOOD.run(**{name: value for name, value in arguments.items() if name not in names})

    return subject(run)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("plain", lambda out, _: out[:, :-1], "shape"),
        ("plain", lambda out, _: out.astype(jnp.bfloat16), "dtype bfloat16, not float32"),
        ("plain", lambda out, _: jnp.asarray((out, out)), "shape"),
        ("plain", lambda out, _: [out, out], "returns"),
        ("plain", lambda out, _: out.at[..., -1].multiply(1.0001), "not equal to"),
        ("blocks_odd", lambda out, _: out.at[:, 36:].add(1e-3), "the worst is"),
        ("mask_row_empty", lambda out, _: out.at[:, 2].add(1e-12), "not equal to"),
        ("nan_in_padded_keys", lambda out, given: out + 0 * given["value"].sum(), "where not finite"),
        ("nan_seen_in_value", lambda out, _: jnp.nan_to_num(out), "where not finite"),
    ],
)
def test_numerics_catch(case, change, message):
    with pytest.raises(AssertionError, match=message):
        check_numerics(broken(change), CASES[case])


def test_numerics_catch_products_of_low_precision():
    def run(query, key, value, **rest):
        rounded = [array.astype(jnp.bfloat16).astype(jnp.float32) for array in (query, key, value)]
        return run_reference(OP, tuple(rounded), rest)

    with pytest.raises(AssertionError, match="not equal to"):
        check_numerics(subject(run), CASES["plain"])


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("plain", lambda out, given: out + 1e-2 * given["query"][-1, -1, -1, -1], "of 'query'"),
        ("plain", lambda out, given: jax.lax.stop_gradient(out), "of 'query'"),
        ("plain", lambda out, given: out + 0.01 * nothing_but_its_derivative(given["key"]), "of 'key'"),
        ("bias_per_head", lambda out, given: out + 0 * jnp.sqrt(0 * given["bias"]).sum(), "not finite"),
    ],
)  # fmt: skip
def test_gradients_catch(case, change, message):
    with pytest.raises(AssertionError, match=message):
        check_gradients(broken(change), CASES[case])


def test_gradients_catch_a_constant_bias():
    def run(**arguments):
        return run_reference(OP, (), {**arguments, "bias": jax.lax.stop_gradient(arguments["bias"])})

    with pytest.raises(AssertionError, match="of 'bias'"):
        check_gradients(subject(run), CASES["bias_keys"])


def nothing_but_its_derivative(array):
    return (array - jax.lax.stop_gradient(array)).sum()


def tracing_differs(out, _):
    return out + 1e-3 * isinstance(out, jax.core.Tracer)


def batched_by(rule):
    """The identity, with a rule for `vmap` and a derivative of its own."""
    identity = custom_vmap(lambda out: out)
    identity.def_vmap(rule)
    call = jax.custom_vjp(identity)
    call.defvjp(lambda out: (identity(out), None), lambda _, cotangent: (cotangent,))
    return call


def batching_takes_the_first(out, _):
    return batched_by(lambda axis_size, in_batched, out: (jnp.broadcast_to(out[:1], out.shape), True))(out)


def batching_needs_elements(out, _):
    def rule(axis_size, in_batched, out):
        assert axis_size > 0
        return out, True

    return batched_by(rule)(out)


def follows_the_global_flag(out, _):
    return out.astype(jnp.result_type(float))


def calls_the_host(out, _):
    shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
    return jax.lax.stop_gradient(jax.pure_callback(np.asarray, shape, out, vmap_method="sequential"))


def has_reverse_mode_only(out, _):
    call = jax.custom_vjp(lambda out: out)
    call.defvjp(lambda out: (out, None), lambda _, cotangent: (cotangent,))
    return call(out)


@pytest.mark.parametrize(
    ("transform", "change", "error"),
    [
        ("jit", tracing_differs, AssertionError),
        ("vmap", batching_takes_the_first, AssertionError),
        ("nested_vmap", batching_takes_the_first, AssertionError),
        ("vmap_of_nothing", batching_needs_elements, AssertionError),
        ("x64", follows_the_global_flag, AssertionError),
        ("export", calls_the_host, NotImplementedError),
        ("jvp", has_reverse_mode_only, TypeError),
    ],
)
def test_transforms_catch(transform, change, error):
    with pytest.raises(error):
        TRANSFORMS[transform](broken(change), CASES["plain"])


def test_a_batch_has_different_and_valid_elements():
    arrays, rest = arguments(OP, CASES["everything"])
    for name, batch in batch_of(OP, arrays, rest).items():
        np.testing.assert_array_equal(batch[0], arrays[name])
        if name != "kv_segment_ids":
            assert (batch[1] != batch[0]).any(), name
    assert {tuple(row) for row in batch_of(OP, arrays, rest)["query_seq_lengths"]} == {(5, 4), (4, 5)}


def test_transform_cases_are_few():
    assert {case.name for case in transform_cases(OP)} == {case.name for case in cases() if case.transforms}
    assert 0 < len(transform_cases(OP)) <= 4


def test_shard_map_catches_communication():
    def communicates(out, _):
        try:
            return out + 0 * jax.lax.psum(out, "batch")
        except NameError:  # not inside shard_map
            return out

    with pytest.raises(AssertionError, match="need no all-reduce"):
        check_shard_map(broken(communicates), CASES["plain"])


@pytest.mark.parametrize(
    "parameter",
    ["bias", "mask", "scale", "is_causal", "query_seq_lengths", "key_value_seq_lengths", "local_window_size",
     "logits_soft_cap", "causal_alignment", "q_segment_ids", "return_residual"],
)  # fmt: skip
def test_sensitivity_catches_an_ignored_argument(parameter):
    pair = ("q_segment_ids", "kv_segment_ids") if "segment" in parameter else (parameter,)
    with pytest.raises(AssertionError, match=f"'{parameter}' is ignored"):
        check_sensitivity(without(*pair), parameter)

"""The interpreted attention kernels themselves, at small blocks: three and more on every axis, with tails."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core.devices import Device
from opmux.core.op import backward_request
from opmux.core.ops.attention import OP
from opmux.core.request import Operands, Request
from opmux.plugins.interpret.attention import attention
from opmux.plugins.interpret.attention_blocks import Blocks
from opmux.plugins.interpret.attention_config import AttentionConfig, default_config, default_vjp_config, supports
from opmux.plugins.interpret.attention_view import View
from opmux.plugins.interpret.attention_vjp import attention_vjp
from opmux.testing.oracle.attention import attention as oracle
from opmux.testing.subject import quick_jit

SMALL = AttentionConfig(block_q=16, block_kv=16, block_heads=1, block_batch=1)
WIDE = AttentionConfig(block_q=24, block_kv=16, block_heads=3, block_batch=3)
CPU = Device("cpu", "cpu")
B, T, S, N, K, H, Hv = 3, 37, 53, 6, 3, 8, 12
RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


Q, KEY, V = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, Hv)
HOLES = RNG.random((B, 1, T, S)) < 0.6
HOLES[1, :, 5:30, :40] = False
SEGMENTS = {
    "q_segment_ids": np.sort(RNG.integers(0, 4, (B, T))).astype(np.int32),
    "kv_segment_ids": np.sort(RNG.integers(0, 4, (B, S))).astype(np.int32),
}
LENGTHS = {
    "query_seq_lengths": np.array([37, 0, 20], np.int32),
    "key_value_seq_lengths": np.array([17, 53, 0], np.int32),
}
LOW_BIAS = np.where(RNG.random((1, N, T, S)) < 0.3, -np.inf, normal(1, N, T, S)).astype(np.float32)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "causal_bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window": {"local_window_size": (5, 3)},
    "window_left": {"local_window_size": (20, None)},
    "lengths": LENGTHS,
    "lengths_causal_bottom_right": {**LENGTHS, "is_causal": True, "causal_alignment": "bottom_right"},
    "segments_window": {**SEGMENTS, "local_window_size": (30, 4)},
    "mask": {"mask": HOLES},
    "mask_of_keys": {"mask": HOLES[:, :, :1]},
    "bias": {"bias": LOW_BIAS, "logits_soft_cap": 2.0},
    "bias_of_heads": {"bias": normal(1, N, 1, S), "is_causal": True, "scale": 0.3},
    "bias_of_rows": {"bias": normal(B, 1, T, 1), "mask": HOLES, **LENGTHS},
}
each_case = pytest.mark.parametrize("name", CASES)
each_config = pytest.mark.parametrize("config", [SMALL, WIDE], ids=["small", "wide"])


def canonical(*arrays: Any, **params: Any) -> tuple[Request, Operands]:
    call = OP.call(arrays, {"return_residual": True, **params})
    return call.request, call.operands


def run_forward(request: Request, operands: Operands, config: AttentionConfig = SMALL) -> Any:
    return quick_jit(lambda operands: attention(request, operands, config))(operands)


def run_backward(request: Request, operands: Operands, config: AttentionConfig = SMALL) -> Any:
    return quick_jit(lambda operands: attention_vjp(request, operands, config))(operands)


def forward(arrays: tuple[Any, ...], params: dict[str, Any], config: AttentionConfig = SMALL) -> tuple[Any, Any]:
    request, operands = canonical(*arrays, **params)
    outputs = run_forward(request, operands, config)
    return outputs["out"], outputs["lse"]


def backward(arrays: tuple[Any, ...], params: dict[str, Any], config: AttentionConfig = SMALL) -> tuple[Any, Any]:
    """Cotangents by the kernel, and by the autodiff of the specification."""
    request, operands = canonical(*arrays, **params)
    back = backward_request(OP, request)
    outputs = run_forward(request, operands, config)
    rng = np.random.default_rng(3)
    cotangents = {f"d_{n}": rng.standard_normal(x.shape).astype(np.float32).astype(x.dtype) for n, x in outputs.items()}
    everything = {**operands, **outputs, **cotangents}
    return run_backward(back, everything, config), quick_jit(lambda operands: OP.vjp.reference(back, operands))(
        everything
    )


def close(got: Any, want: Any, rtol: float) -> None:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    scale = np.abs(want[np.isfinite(want)]).max(initial=1e-3)
    np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol * scale)


@each_config
@each_case
def test_forward(name: str, config: AttentionConfig) -> None:
    out, lse = forward((Q, KEY, V), CASES[name], config)
    want, want_lse = oracle(Q, KEY, V, return_residual=True, **CASES[name])
    close(out, want, 5e-6)
    close(lse, want_lse, 5e-6)


@each_config
@each_case
def test_backward(name: str, config: AttentionConfig) -> None:
    got, want = backward((Q, KEY, V), CASES[name], config)
    assert got.keys() == want.keys()
    for operand in want:
        close(got[operand], want[operand], 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_accumulate_in_float32(dtype: Any) -> None:
    arrays = tuple(np.asarray(jnp.asarray(array, dtype)) for array in (Q, KEY, V))
    out, _ = forward(arrays, CASES["causal"])
    assert out.dtype == dtype
    close(out, oracle(*arrays, is_causal=True), 2.0**-8 if dtype == jnp.bfloat16 else 2.0**-10)
    for operand, cotangent in backward(arrays, CASES["causal"])[0].items():
        assert cotangent.dtype == dtype, operand


def test_float64_is_float64_inside() -> None:
    with jax.enable_x64(True):
        arrays = tuple(array.astype(np.float64) for array in (Q, KEY, V))
        params = {**CASES["lengths_causal_bottom_right"], "bias": normal(1, N, T, S).astype(np.float64)}
        out, lse = forward(arrays, params)
        want, want_lse = oracle(*arrays, return_residual=True, **params)
        close(out, want, 1e-13)
        close(lse, want_lse, 1e-13)
        got, reference = backward(arrays, params)
        for operand in reference:
            close(got[operand], reference[operand], 1e-11)


def test_float32_is_the_same_under_x64() -> None:
    want, _ = forward((Q, KEY, V), CASES["window"])
    with jax.enable_x64(True):
        got, _ = forward((Q, KEY, V), CASES["window"])
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_reaches_exactly_those_who_see_it(value: float) -> None:
    key, v = KEY.copy(), V.copy()
    key[0, 20, 1, 3] = value
    v[1, 30, 2, 5] = value
    out, lse = forward((Q, key, v), CASES["causal"])
    want, want_lse = (np.zeros(np.shape(x), bool) for x in (out, lse))
    want_lse[0, 20:, 2:4] = want[0, 20:, 2:4] = True
    want[1, 30:, 4:6, 5] = True
    np.testing.assert_array_equal(np.isnan(out), want)
    np.testing.assert_array_equal(np.isnan(lse), want_lse)

    got, _ = backward((Q, key, v), CASES["causal"])
    rows = want.any(-1)
    np.testing.assert_array_equal(np.isnan(got["query"]).any(-1), rows)
    # A key that an affected row sees is affected; one after the last row is seen by none.
    affected = np.zeros((B, S, K), bool)
    affected[0, :T, 1] = affected[1, :T, 2] = True
    np.testing.assert_array_equal(np.isnan(got["key"]).any(-1), affected)
    assert not np.isnan(np.asarray(got["value"])[1:]).any()


def test_padding_may_hold_anything() -> None:
    q, key, v = Q.copy(), KEY.copy(), V.copy()
    q[2, 20:] = key[0, 17:] = v[0, 17:] = np.nan
    for run in (lambda *arrays: forward(arrays, LENGTHS)[0], lambda *arrays: backward(arrays, LENGTHS)[0]):
        clean, dirty = run(Q, KEY, V), run(q, key, v)
        jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_large_bias_gradient_is_summed_over_what_was_broadcast() -> None:
    for shape in ((1, 1, T, S), (B, 1, 1, S), (1, N, T, 1), (1, 1, 1, 1)):
        got, want = backward((Q, KEY, V), {"bias": normal(*shape)})
        assert got["bias"].shape == shape
        close(got["bias"], want["bias"], 1e-5)


@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value",), ("bias", "key")])
def test_only_wanted_cotangents(wanted: tuple[str, ...]) -> None:
    request, operands = canonical(Q, KEY, V, normal(1, N, T, S))
    outputs = run_forward(request, operands)
    everything = {**operands, **outputs, "d_out": outputs["out"], "d_lse": outputs["lse"]}
    all_of_them = run_backward(backward_request(OP, request), everything)
    some = run_backward(backward_request(OP, request, wanted), everything)
    assert tuple(some) == wanted
    for name in wanted:
        np.testing.assert_allclose(some[name], all_of_them[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 3, 5, 2, 4), (2, 0, 5, 2, 4), (2, 3, 0, 2, 4), (2, 3, 5, 2, 0)])
def test_nothing_to_compute(shape: tuple[int, ...]) -> None:
    b, t, s, n, h = shape
    arrays = normal(b, t, n, h), normal(b, s, n, h), normal(b, s, n, 6)
    out, lse = forward(arrays, {})
    want, want_lse = oracle(*arrays, return_residual=True)
    close(out, want, 5e-6)
    close(lse, want_lse, 5e-6)
    got, reference = backward(arrays, {})
    for operand in reference:
        close(got[operand], reference[operand], 1e-5)


def test_vmap_over_any_operands() -> None:
    request, operands = canonical(Q, KEY, V, **CASES["lengths_causal_bottom_right"])
    stack = {name: jnp.stack([array, jnp.roll(array, 1, 0), array[::-1]]) for name, array in operands.items()}
    single = quick_jit(lambda operands: attention(request, operands, SMALL))
    for batched in (["query"], ["kv_lengths"], ["key", "value", "q_lengths"], list(operands)):
        axes = {name: 0 if name in batched else None for name in operands}
        given = {name: stack[name] if name in batched else operands[name] for name in operands}
        run = jax.vmap(lambda operands: attention(request, operands, SMALL), in_axes=(axes,))
        got = quick_jit(run)(given)
        for i in range(3):
            one = {name: stack[name][i] if name in batched else operands[name] for name in operands}
            want = single(one)
            np.testing.assert_allclose(got["out"][i], want["out"], rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(got["lse"][i], want["lse"], rtol=1e-6, atol=1e-6)


def test_nested_vmap_of_the_backward() -> None:
    request, operands = canonical(Q, KEY, V, normal(1, 1, T, S), **LENGTHS)
    back = backward_request(OP, request)
    outputs = run_forward(request, operands)
    everything = {**operands, **outputs, "d_out": outputs["out"], "d_lse": jnp.ones_like(outputs["lse"])}
    scales = jnp.array([[1.0, 2.0], [-1.0, 0.5]])

    def run(scale: jax.Array) -> Any:
        return attention_vjp(back, {**everything, "d_out": scale * everything["d_out"]}, SMALL)

    got, single = quick_jit(jax.vmap(jax.vmap(run)))(scales), quick_jit(run)
    for i, j in np.ndindex(2, 2):
        want = single(scales[i, j])
        for name in back.wanted:
            np.testing.assert_allclose(got[name][i, j], want[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["plain", "causal", "causal_bottom_right", "window", "window_left"])
def test_walk_skips_what_no_row_sees_and_masks_only_what_some_do_not(name: str) -> None:
    request, _ = canonical(Q, KEY, V, **CASES[name])
    ones = np.ones((1, T, 1, 1)), np.ones((1, S, 1, 1)), np.eye(S)[None, :, None]
    seen = np.asarray(oracle(*ones, **CASES[name]))[0, :, 0] > 0
    blocks = Blocks.of(request, SMALL)
    for t in range(0, T, 16):
        first, low, high, last = (int(bound) for bound in View(blocks, {}, 0, 0, t).bounds())
        for j in range(-(-S // 16)):
            block = seen[t : t + 16, j * 16 : (j + 1) * 16]
            assert (first <= j < last) == block.any(), (t, j)
            assert (low <= j < high) == (block.all() and block.shape[1] == 16), (t, j)


@pytest.mark.parametrize("params", [{}, {"is_causal": True}])
def test_memory_is_linear_in_the_length(params: dict[str, Any]) -> None:
    def temporary(length: int) -> int:
        array = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        request = OP.request((array,) * 3, params)
        back = backward_request(OP, request)
        config = AttentionConfig(block_q=128, block_kv=128)

        def both(query: Any, key: Any, value: Any) -> Any:
            operands = {"query": query, "key": key, "value": value}
            outputs = attention(request, operands, config)
            return attention_vjp(back, {**operands, **outputs, "d_out": outputs["out"]}, config)

        analysis = jax.jit(both).lower(array, array, array).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporary(2048) < 2.2 * temporary(1024)


def test_configs_fit_every_shape() -> None:
    sizes = ((1, 1, 1, 1, 1), (2, 4096, 4096, 8, 8), (1, 1, 5000, 32, 8), (3, 1003, 17, 64, 1), (0, 0, 0, 2, 1))
    for b, t, s, n, k in sizes:
        shapes = ((b, t, n, 8), (b, s, k, 8), (b, s, k, 8))
        request = OP.request(tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), {})
        for config in (default_config(request, CPU), default_vjp_config(request, CPU)):
            scores = config.block_q * config.block_kv * config.block_heads * config.block_batch * (n // k)
            assert scores <= 2**21, config


def test_shard_map_with_checks_is_rejected_for_a_reason() -> None:
    """The rejection is there because the kernel fails; without the checks it runs."""
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    array = jnp.asarray(Q[:2, :, :K])
    requests = []

    def body(array: jax.Array) -> jax.Array:
        request, operands = canonical(array, array, array)
        requests.append(request)
        return attention(request, operands, SMALL)["out"]

    def run(check: bool) -> jax.Array:
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check))(array)

    with pytest.raises(Exception, match=r"vma|manual|vary|check"):
        run(True)
    assert [rejection.code for rejection in supports(requests[-1], CPU)] == ["shard_map"]
    close(run(False), oracle(array, array, array), 5e-6)
    assert supports(requests[-1], CPU) == []

"""Attention kernels in the TPU simulator: three blocks and more on both sequence axes, with tails, against float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core import devices
from opmux.core.cases.attention import cases
from opmux.core.op import backward_request
from opmux.core.ops.attention import OP
from opmux.core.request import Operands, Request
from opmux.core.simulation import SimulatorOptions
from opmux.plugins.mosaic_tpu.attention import attention
from opmux.plugins.mosaic_tpu.attention_config import AttentionConfig, AttentionVjpConfig, supports
from opmux.plugins.mosaic_tpu.attention_tiling import Tiling
from opmux.plugins.mosaic_tpu.attention_vjp import attention_vjp
from opmux.plugins.mosaic_tpu.simulator import simulate
from opmux.testing.oracle.attention import attention as oracle
from opmux.testing.tolerances import assert_close, rtol

V6E = devices.device("tpu-v6e")
SMALL = AttentionConfig(block_q=128, block_kv=128, chunk_q=128, span_kv=256)
UNEVEN = AttentionConfig(block_q=256, block_kv=256, chunk_q=128, span_kv=256, part_kv=128)
SMALL_VJP = AttentionVjpConfig(block_q=128, block_kv=128, chunk_q=128, span_kv=512)
SPANS_VJP = AttentionVjpConfig(block_q=256, block_kv=128, chunk_q=128, span_kv=256)
MODES = {
    "on_wait": SimulatorOptions(),
    "eager": SimulatorOptions(dma="eager"),
    "two_cores": SimulatorOptions(cores=2, seed=1),
    "two_cores_other": SimulatorOptions(cores=2, seed=2),
}
B, T, S, N, K, H, Hv = 2, 300, 420, 2, 1, 16, 24
RNG = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


Q, KEY, V = normal(B, T, N, H), normal(B, S, K, H), normal(B, S, K, Hv)
HOLES = RNG.random((B, 1, T, S)) < 0.6
HOLES[1, :, 5:290, :300] = False
SEGMENTS = {
    "q_segment_ids": np.sort(RNG.integers(0, 4, (B, T))).astype(np.int32),
    "kv_segment_ids": np.sort(RNG.integers(0, 4, (B, S))).astype(np.int32),
}
LENGTHS = {"query_seq_lengths": np.array([290, 140], np.int32), "key_value_seq_lengths": np.array([130, 400], np.int32)}
NO_LENGTHS = {"query_seq_lengths": np.array([0, 300], np.int32), "key_value_seq_lengths": np.array([7, 0], np.int32)}
LOW_BIAS = np.where(RNG.random((1, N, T, S)) < 0.3, -np.inf, normal(1, N, T, S)).astype(np.float32)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (90, 30), "causal_alignment": "bottom_right"},
    "lengths_causal": {**LENGTHS, "is_causal": True, "causal_alignment": "bottom_right"},
    "bias_cap": {"bias": LOW_BIAS, "logits_soft_cap": 2.0},
    "segments_mask": {**SEGMENTS, "mask": HOLES},
    "causal_bottom_right": {"is_causal": True, "causal_alignment": "bottom_right"},
    "window_left": {"local_window_size": (200, None)},
    "lengths": LENGTHS,
    "lengths_of_nothing": {**NO_LENGTHS, "local_window_size": 3},
    "segments_window": {**SEGMENTS, "local_window_size": (100, 4)},
    "mask": {"mask": HOLES},
    "mask_of_keys": {"mask": HOLES[:, :, :1], "is_causal": True},
    "mask_of_rows": {"mask": HOLES[:, :, :, :1]},
    "mask_of_all": {"mask": HOLES[:, :, :1, :1]},
    "bias_of_heads": {"bias": normal(1, N, 1, S), "is_causal": True, "scale": 0.3},
    "bias_of_rows": {"bias": normal(B, 1, T, 1), "mask": HOLES, **LENGTHS},
    "bias_of_all": {"bias": normal(1, 1, 1, 1), "logits_soft_cap": 5.0},
    "bias_of_batch": {"bias": normal(1, 1, T, S), "local_window_size": (10, 80)},
}
SELECTIVE = (
    "bias_cap",
    "mask_of_keys",
    "mask_of_rows",
    "mask_of_all",
    "bias_of_heads",
    "bias_of_rows",
    "segments_window",
)
QUICK = {"forward": ("causal", "lengths_causal", "bias_cap", "segments_mask"), "backward": ("window", "bias_cap")}


def each_call(which: str) -> Any:
    names = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK[which])) for name in CALLS]
    return pytest.mark.parametrize("name", names)


def canonical(*arrays: Any, **params: Any) -> tuple[Request, Operands]:
    call = OP.call(arrays, {"return_residual": True, **params})
    assert not supports(call.request, V6E)
    return call.request, call.operands


def forward(
    arrays: tuple[Any, ...], params: dict[str, Any], config: AttentionConfig = SMALL, mode: str = "on_wait"
) -> tuple[np.ndarray, np.ndarray]:
    request, operands = canonical(*arrays, **params)
    outputs = simulate(attention, request, operands, config, MODES[mode])
    return np.asarray(outputs["out"]), np.asarray(outputs["lse"])


def check_forward(arrays: tuple[Any, ...], params: dict[str, Any], **options: Any) -> None:
    out, lse = forward(arrays, params, **options)
    want, want_lse = oracle(*arrays, return_residual=True, **params)
    tolerance = rtol(out.dtype, S)
    assert_close(out, want, tolerance, "out", exact_zeros=True)
    assert_close(lse, want_lse, rtol(lse.dtype, S), "lse")


def backward(
    arrays: tuple[Any, ...], params: dict[str, Any], config: AttentionVjpConfig = SMALL_VJP, mode: str = "on_wait",
    wanted: tuple[str, ...] | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """Cotangents by the kernel, and by the autodiff of the specification, whose residuals it gets."""
    request, operands = canonical(*arrays, **params)
    back = backward_request(OP, request, wanted)
    outputs = jax.jit(lambda operands: OP.reference(request, operands))(operands)
    rng = np.random.default_rng(3)
    cotangents = {f"d_{n}": rng.standard_normal(x.shape).astype(np.float32).astype(x.dtype) for n, x in outputs.items()}
    everything = {**operands, **outputs, **cotangents}
    got = simulate(attention_vjp, back, everything, config, MODES[mode])
    return got, jax.jit(lambda operands: OP.vjp.reference(back, operands))(everything)


def check_backward(*args: Any, **options: Any) -> None:
    got, want = backward(*args, **options)
    assert got.keys() == want.keys()
    for operand in want:
        assert got[operand].dtype == want[operand].dtype
        assert_close(got[operand], want[operand], 4 * rtol(got[operand].dtype, S), operand)


@each_call("forward")
def test_forward(name: str) -> None:
    check_forward((Q, KEY, V), CALLS[name])


@each_call("backward")
def test_backward(name: str) -> None:
    check_backward((Q, KEY, V), CALLS[name])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["plain", "causal", "lengths_causal", "bias_cap"])
def test_other_blocks_and_modes(name: str, mode: str) -> None:
    arrays = normal(B, T, 4, H), normal(B, S, 2, H), normal(B, S, 2, Hv)
    params = {n: np.repeat(x, 2, 1) if n == "bias" else x for n, x in CALLS[name].items()}
    check_forward(arrays, params, config=UNEVEN, mode=mode)
    check_backward(arrays, params, config=SPANS_VJP, mode=mode)


@pytest.mark.parametrize("name", ["segments_mask", *(pytest.param(name, marks=pytest.mark.slow) for name in SELECTIVE)])
def test_each_span_of_keys_has_its_part_of_what_hides_keys(name: str) -> None:
    keys = 257  # the last span is one key
    cut = {"bias": 3, "mask": 3, "kv_segment_ids": 1}
    params = {
        n: np.take(x, range(keys), cut[n]) if n in cut and x.shape[cut[n]] > 1 else x for n, x in CALLS[name].items()
    }
    check_backward((Q, KEY[:, :keys], V[:, :keys]), params, config=SPANS_VJP)


@pytest.mark.parametrize("name", ["causal", pytest.param("bias_cap", marks=pytest.mark.slow)])
def test_bfloat16_accumulates_in_float32(name: str) -> None:
    arrays = tuple(np.asarray(jnp.asarray(array, jnp.bfloat16)) for array in (Q, KEY, V))
    check_forward(arrays, CALLS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "bias_cap"])
def test_bfloat16_gradients(name: str) -> None:
    arrays = tuple(np.asarray(jnp.asarray(array, jnp.bfloat16)) for array in (Q, KEY, V))
    check_backward(arrays, CALLS[name])


def test_even_blocks_of_several_spans() -> None:
    check_forward((Q[:1, :256], normal(1, 512, K, H), normal(1, 512, K, Hv)), {})


@pytest.mark.slow
def test_float16_is_float32_inside() -> None:
    arrays = tuple(array.astype(np.float16) for array in (Q, KEY, V))
    check_forward(arrays, CALLS["causal"])
    check_backward(arrays, CALLS["causal"])


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cases(run: Any, refused: Any, case: Any) -> None:
    args, kwargs = case.arguments()
    try:
        got = run("attention")(*args, **kwargs)
    except refused as refusal:
        (reasons,) = refusal.args
        assert all(reason.code and reason.detail and reason.hint for reason in reasons)
        pytest.xfail(str(reasons[0].detail))
    want = oracle(*args, **kwargs)
    coarse = jnp.result_type(*args[:3]) if case.rtol is None else np.float32
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(one, other, case.rtol or max(rtol(coarse, 512), rtol(one.dtype, 512)), case.name)


@pytest.mark.parametrize("value", [np.nan, pytest.param(np.inf, marks=pytest.mark.slow)])
def test_what_is_not_finite_reaches_exactly_those_who_see_it(value: float) -> None:
    key, v = KEY.copy(), V.copy()
    key[0, 200, 0, 3] = value
    v[1, 130, 0, 5] = value
    out, lse = forward((Q, key, v), CALLS["causal"])
    want, want_lse = (np.zeros(x.shape, bool) for x in (out, lse))
    want_lse[0, 200:] = want[0, 200:] = True
    want[1, 130:, :, 5] = True
    if value == np.inf:  # a score of -inf is a weight of 0
        want[0], want_lse[0] = ~np.isfinite(out[0]), ~np.isfinite(lse[0])
        assert not want[0, :200].any()
    np.testing.assert_array_equal(~np.isfinite(out), want)
    np.testing.assert_array_equal(~np.isfinite(lse), want_lse)


@pytest.mark.parametrize("run", [forward, pytest.param(lambda *a: backward(*a)[0], marks=pytest.mark.slow)])
def test_padding_may_hold_anything(run: Any) -> None:
    q, key, v = Q.copy(), KEY.copy(), V.copy()
    q[1, 140:] = key[0, 130:] = v[0, 130:] = np.nan
    clean, dirty = run((Q, KEY, V), LENGTHS), run((q, key, v), LENGTHS)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [("query",), ("key",), ("value",), ("bias", "key")])
def test_only_wanted_cotangents(wanted: tuple[str, ...]) -> None:
    check_backward((Q, KEY, V), CALLS["bias_of_heads"], wanted=wanted)


@pytest.mark.slow
def test_same_values_with_64_bits_enabled() -> None:
    want = forward((Q, KEY, V), CALLS["lengths_causal"])
    with jax.enable_x64(True):
        got = forward((Q, KEY, V), CALLS["lengths_causal"])
        check_backward((Q, KEY, V), CALLS["lengths_causal"])
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", ["plain", "causal", "causal_bottom_right", "window", "window_left"])
def test_blocks_that_no_row_sees_are_neither_computed_nor_copied(name: str) -> None:
    request, _ = canonical(Q, KEY, V, **CALLS[name])
    ones = np.ones((1, T, 1, 1)), np.ones((1, S, 1, 1)), np.eye(S)[None, :, None]
    seen = np.asarray(oracle(*ones, **CALLS[name]))[0, :, 0] > 0
    tiling = Tiling.of(request, 128, 128, 128)
    bounds = tiling.bounds(0, ())
    for i in range(tiling.grid[3]):
        held = [int(tiling.key_block(i, j, bounds)) for j in range(tiling.grid[4])]
        for j in range(tiling.grid[4]):
            block = seen[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            assert bool(tiling.runs(i, j, bounds)) == block.any(), (i, j)
            # At the ends rows that do not exist may count as rows that do not see everything.
            assert block.all() or not tiling.whole(i, j, bounds), (i, j)
            assert bool(tiling.whole(i, j, bounds, rows=True)) == (block.all() and block.shape == (128, 128)), (i, j)
        used = [j for j in range(tiling.grid[4]) if tiling.runs(i, j, bounds)]
        assert sorted(set(held)) == used or not used

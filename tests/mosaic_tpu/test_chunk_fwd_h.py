"""`chunk_fwd_h` and its backward in the simulator, against the float64 oracle and the reference's gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core import devices
from opmux.core.cases.chunk_fwd_h import BF16, cases, golden, make_case
from opmux.core.op import backward_request
from opmux.core.ops.chunk_fwd_h import OP
from opmux.core.simulation import SimulatorOptions
from opmux.plugins import mosaic_tpu
from opmux.plugins.mosaic_tpu.chunk_fwd_h_config import ChunkFwdHConfig, ChunkFwdHVjpConfig
from opmux.plugins.mosaic_tpu.simulator import simulate
from opmux.testing.oracle.chunk_fwd_h import chunk_fwd_h as oracle
from opmux.testing.tolerances import GRADIENT_FACTOR, assert_close, coarsest, rtol

IMPLEMENTATIONS = {found.op: found for found in mosaic_tpu.opmux_implementations()}
V6E = devices.device("tpu-v6e")
LATE, EARLY = SimulatorOptions(dma="on_wait"), SimulatorOptions(dma="eager", cores=2, seed=1)
EVERY = ("g", "g_gamma", "gk", "gv")

# Sums of h and of ht; from an independent implementation.
GOLDEN = {(): (43.727281443536, 15.008243785079), ("g", "gk"): (5.471000021950, -4.414303635615)}

# Three steps and a tail along the tokens; a tail of heads and of value channels where blocks are small.
BLOCKS = {
    "fixed": make_case("fixed", EVERY, B=1, T=37, H=3, K=5, V=6, h0=True, raw=False),
    "fixed_raw_split": make_case("fixed_raw_split", EVERY, B=1, T=83, H=2, K=3, V=4, chunk_size=8, split_size=24,
                                 h0=True),
    "packed": make_case("packed", EVERY, cu_seqlens=[0, 20, 21, 21, 53, 60], H=3, K=5, V=6, h0=True, raw=False),
    "packed_raw_split": make_case("packed_raw_split", EVERY, cu_seqlens=[0, 0, 3, 61, 80], H=2, K=3, V=4, chunk_size=8,
                                  split_size=24, h0=True),
    "many_heads": make_case("many_heads", ("g", "gk"), B=1, T=40, H=12, K=4, V=5, h0=True),
    "many_heads_packed": make_case("many_heads_packed", ("g",), cu_seqlens=[0, 17, 40], H=12, K=4, V=5, h0=True),
    "wide": make_case("wide", ("gk", "gv"), B=1, T=19, H=2, K=256, V=140, chunk_size=16, h0=True, raw=False),
    "full_tiles": make_case("full_tiles", EVERY, B=1, T=48, H=4, K=128, V=128, h0=True, dtype=BF16),
    "full_tiles_packed": make_case("full_tiles_packed", EVERY, H=4, K=128, V=128, h0=True, raw=False,
                                   cu_seqlens=[0, 20, 21, 21, 60]),
}  # fmt: skip
QUICK = {("fixed", LATE), ("packed", EARLY), ("packed_raw_split", LATE), ("many_heads", EARLY)}


def check(case, options=LATE, *, backward=True, config=None):
    args, kwargs = case.arguments()
    call = OP.call(args, kwargs)
    request = call.request
    forward, vjp = IMPLEMENTATIONS["chunk_fwd_h"], IMPLEMENTATIONS["chunk_fwd_h_vjp"]
    assert not forward.supports(request, V6E)
    config = config or forward.config_for(request, V6E)
    outputs = simulate(forward.load(), request, call.operands, config, options)
    longest = max((size for _, spec in request.operands for size in spec.shape), default=1)
    accurate = case.rtol or rtol(coarsest(call.operands.values()), longest)
    specs = OP.outputs(request)
    with np.errstate(all="ignore"):
        want = dict(zip(("h", "ht"), oracle(*args, **kwargs), strict=True))
    for name in request.wanted:
        assert (outputs[name].shape, outputs[name].dtype) == (specs[name].shape, specs[name].dtype)
        assert_close(outputs[name], want[name], accurate, name)
    if not (backward and case.grad):
        return
    backwards = backward_request(OP, request)
    assert not vjp.supports(backwards, V6E)
    rng = np.random.default_rng(5)
    operands = {**call.operands, "h": outputs["h"]}
    for name in request.wanted:
        operands[f"d_{name}"] = jnp.asarray(rng.standard_normal(specs[name].shape), specs[name].dtype)
    got = simulate(vjp.load(), backwards, operands, vjp.config_for(backwards, V6E), options)
    expected = jax.jit(lambda operands: OP.vjp.reference(backwards, operands))(operands)
    assert set(got) == set(expected)
    for name, cotangent in expected.items():
        assert (got[name].shape, got[name].dtype) == (cotangent.shape, cotangent.dtype)
        assert_close(got[name], np.asarray(cotangent, np.float64), GRADIENT_FACTOR * accurate, f"d_{name}")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(
            name, options, id=f"{name}-{options.dma}", marks=[pytest.mark.slow] * ((name, options) not in QUICK)
        )
        for name in BLOCKS
        for options in (LATE, EARLY)
    ],
)
def test_several_blocks_forward_and_backward(name, options):
    check(BLOCKS[name], options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [LATE, EARLY], ids=lambda options: options.dma)
@pytest.mark.parametrize("case", [case for case in cases() if not case.long], ids=lambda case: case.name)
def test_every_case_forward_and_backward(case, options):
    check(case, options)


@pytest.mark.parametrize(
    "name",
    [
        "ones",
        "no_tokens",
        "no_heads",
        "packed_all_empty",
        "packed_no_sequence",
        "g_reset",
        "packed_empty_inside",
        "nan_stays_in_its_sequence",
        "gamma_short_tail",
    ],
)
def test_telling_cases(name):
    check(next(case for case in cases() if case.name == name), backward=name.startswith("no_"))


@pytest.mark.parametrize("gates", GOLDEN, ids="_".join)
def test_golden_values(run, gates):
    args, kwargs = golden(gates)(np.random.default_rng(0))
    h, ht = (np.asarray(array, np.float64) for array in run("chunk_fwd_h")(*args, **kwargs))
    # The inputs are the formulas rounded to float32, and sums run over 72 terms of up to 8.
    np.testing.assert_allclose((h.sum(), ht.sum()), GOLDEN[gates], rtol=0, atol=3e-5)


def test_golden_values_of_packed_sequences(run):
    args, kwargs = golden(("gk",), [0, 5, 5, 37])(np.random.default_rng(0))
    h, ht = (np.asarray(array) for array in run("chunk_fwd_h")(*args, **kwargs))
    got = (h.sum(dtype=np.float64), h[0, 1, 0, 0, 0], h[0, 2, 1, 3, 2], ht.sum(dtype=np.float64), ht[2, 0, 0, 0])
    want = (2.776984228258, 0.070560004030, -0.216724961556, 10.167419565142, -1.929449647076)
    np.testing.assert_allclose(got, want, rtol=0, atol=3e-5)
    np.testing.assert_array_equal(ht[1], kwargs["h0"][1])


def test_value_channels_in_blocks():
    case = make_case("values", ("g", "gk", "gv"), B=1, T=19, H=2, K=4, V=140, h0=True)
    check(case, config=ChunkFwdHConfig(block_tokens=8, block_values=128), backward=False)


def traced(cu_seqlens, T, **options):
    """Rows, states and cotangents of packed sequences whose offsets are not known when shapes are decided."""
    rng = np.random.default_rng(0)
    arrays = {"k": rng.standard_normal((1, T, 2, 3)), "v": rng.standard_normal((1, T, 2, 4))}
    arrays |= {"g": -0.2 * rng.random((1, T, 2)), "gk": -0.2 * rng.random((1, T, 2, 3))}
    arrays |= {"h0": rng.standard_normal((len(cu_seqlens) - 1, 2, 3, 4))}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    static = {"gates": "raw", "output_final_state": True, **options}
    struct = jax.ShapeDtypeStruct((len(cu_seqlens),), np.int32)
    request = OP.request((), {**arrays, **static, "cu_seqlens": struct})
    operands = {**{name: jnp.asarray(array) for name, array in arrays.items()}, "cu_seqlens": jnp.asarray(cu_seqlens)}
    return request, operands, arrays, static


@pytest.mark.parametrize("split_size", [8, pytest.param(16, marks=pytest.mark.slow)])
def test_traced_offsets_leave_zeros_in_rows_and_tokens_of_nobody(split_size):
    cu_seqlens, T = np.asarray([0, 9, 9, 30], np.int32), 37
    request, operands, arrays, static = traced(cu_seqlens, T, chunk_size=8, split_size=split_size)
    forward, vjp = IMPLEMENTATIONS["chunk_fwd_h"], IMPLEMENTATIONS["chunk_fwd_h_vjp"]
    outputs = simulate(forward.load(), request, operands, forward.config_for(request, V6E), LATE)
    tokens = {name: array if name == "h0" else array[:, :30] for name, array in arrays.items()}
    h, ht = oracle(**tokens, cu_seqlens=cu_seqlens, **static)
    rows = h.shape[1]
    assert outputs["h"].shape[1] > rows
    assert_close(outputs["h"][:, :rows], h, 1e-5, "h")
    assert not np.asarray(outputs["h"][:, rows:]).any()
    assert_close(outputs["ht"], ht, 1e-5, "ht")

    backwards = backward_request(OP, request)
    operands["h"] = outputs["h"]
    rng = np.random.default_rng(1)
    operands |= {f"d_{n}": jnp.asarray(rng.standard_normal(outputs[n].shape), jnp.float32) for n in ("h", "ht")}
    got = simulate(vjp.load(), backwards, operands, ChunkFwdHVjpConfig(block_tokens=8), LATE)
    want = OP.vjp.reference(backwards, operands)
    for name, cotangent in want.items():
        assert_close(got[name], np.asarray(cotangent, np.float64), 2e-5, f"d_{name}")
    assert not np.asarray(got["k"][:, 30:]).any()


@pytest.mark.slow
def test_same_values_with_64_bits_enabled():
    with jax.enable_x64(True):
        check(BLOCKS["fixed"])
        check(BLOCKS["packed_raw_split"])


@pytest.mark.parametrize(
    ("dtype", "word"), [(jnp.float8_e4m3fn, "do not widen"), (jnp.float64, "64-bit")], ids=["float8", "float64"]
)
def test_dtypes_that_are_refused(dtype, word):
    with jax.enable_x64(True):
        struct = jax.ShapeDtypeStruct((1, 64, 2, 8), dtype)
        request = OP.request((struct, struct), {})
        for found, asked in (("chunk_fwd_h", request), ("chunk_fwd_h_vjp", backward_request(OP, request))):
            (reason,) = IMPLEMENTATIONS[found].supports(asked, V6E)
            assert reason.code == "dtype"
            assert word in reason.detail
            assert reason.hint


def test_what_does_not_fit_in_memory_is_refused_with_the_figures():
    k = jax.ShapeDtypeStruct((1, 8192, 8, 256), jnp.float32)
    request = OP.request((k, k), {"gk": k, "gv": k, "chunk_size": 512})
    v4, v6e = devices.device("tpu-v4"), V6E
    supports = IMPLEMENTATIONS["chunk_fwd_h"].supports
    assert not supports(request, v6e)
    (reason,) = supports(request, v4)
    assert reason.code == "config"
    assert "512 tokens" in reason.detail
    assert "chunk_size" in reason.hint
    # Gates per token may be summed over shorter steps.
    assert not supports(OP.request((k, k), {"gk": k, "chunk_size": 512, "gates": "raw"}), v4)

    offsets = jax.ShapeDtypeStruct((300_001,), np.int32)
    k = jax.ShapeDtypeStruct((1, 1_000_000, 1, 16), jnp.float32)
    (reason,) = supports(OP.request((k, k), {"cu_seqlens": offsets, "chunk_size": 16}), v6e)
    assert reason.code == "shape"
    assert "scalar memory" in reason.detail


@pytest.mark.parametrize("name", [name for name in devices.names() if name.startswith("tpu")])
def test_default_configs_ask_for_no_more_memory_than_there_is(name):
    device = devices.device(name)
    k = jax.ShapeDtypeStruct((2, 4096, 16, 256), jnp.bfloat16)
    request = OP.request((k, k), {"chunk_size": 64})
    for op, asked in (("chunk_fwd_h", request), ("chunk_fwd_h_vjp", backward_request(OP, request))):
        config = IMPLEMENTATIONS[op].config_for(asked, device)
        assert config.vmem_limit_bytes <= device.vmem_bytes

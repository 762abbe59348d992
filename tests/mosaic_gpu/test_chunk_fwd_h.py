"""`chunk_fwd_h` in the simulator, against the float64 oracle: the table's cases, and walks of many tiles.

Races are looked for, memory that nobody wrote is NaN, and 32 TMA copies may be under way.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux import registry
from opmux.core import devices
from opmux.core.cases import chunk_fwd_h as chunk_cases
from opmux.core.op import backward_request
from opmux.core.ops.chunk_fwd_h import OP
from opmux.plugins import mosaic_gpu
from opmux.plugins.mosaic_gpu import chunk_fwd_h_config
from opmux.plugins.mosaic_gpu.chunk_fwd_h_config import ChunkFwdHConfig, smem_bytes
from opmux.testing.gradients import check_gradients
from opmux.testing.oracle.chunk_fwd_h import chunk_fwd_h as oracle
from opmux.testing.subject import Subject
from opmux.testing.tolerances import assert_close, coarsest, rtol

pytestmark = pytest.mark.filterwarnings("ignore::opmux.core.errors.SimulatedBackendWarning")

BF16, F16 = jnp.bfloat16, np.float16
H200 = devices.device("h200")
QUICK = {"all_cumulative", "bf16", "golden_g_gk", "no_tokens", "gamma_lightning", "f16_packed"}
QUICK_GRADIENTS = {"bf16"}
EVERY = ("g", "g_gamma", "gk", "gv")
# 6,150 sequences and heads, one after another, take the simulator minutes; other packed cases have all that is in them.
TABLE = [case for case in chunk_cases.cases() if not case.long]


def params(quick, cases=TABLE):
    return [pytest.param(c, id=c.name, marks=() if c.name in quick else pytest.mark.slow) for c in cases]


def check(gpu, args, kwargs, config=None):
    got = gpu("chunk_fwd_h")(*args, config=config, **kwargs)
    arrays = [array for array in (*args, *kwargs.values()) if hasattr(array, "dtype")]
    tolerance = rtol(coarsest(arrays), max((size for array in arrays for size in array.shape), default=1))
    for name, found, want in zip(("h", "ht"), got, oracle(*args, **kwargs), strict=True):
        assert (found is None) == (want is None)
        if want is not None:
            assert_close(found, want, tolerance, name)
    return got


@pytest.mark.parametrize("case", params(QUICK))
def test_cases(gpu, case):
    args, kwargs = case.arguments()
    if reasons := gpu("chunk_fwd_h").refusals(*args, **kwargs):
        pytest.xfail(reasons[0].detail)
    check(gpu, args, kwargs)


@pytest.mark.parametrize("case", params(QUICK_GRADIENTS, [case for case in TABLE if case.grad]))
def test_gradients(gpu, case):
    args, kwargs = case.arguments()
    if reasons := gpu("chunk_fwd_h").refusals(*args, **kwargs):
        pytest.xfail(reasons[0].detail)
    check_gradients(Subject.of("chunk_fwd_h", "mosaic_gpu"), case)


def test_quick_cases_exist():
    assert {case.name for case in TABLE} >= QUICK | QUICK_GRADIENTS


SMALL = {"block_v": 64, "num_stages": 2, "num_ctas": 2}
"""Two blocks; more tiles of tokens than stages, and of channels than blocks."""


def slow(gates, **sizes):
    return pytest.param(gates, sizes, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("gates", "sizes"),
    [
        (("gk",), {"T": 300, "K": 128, "V": 192, "H": 1}),
        slow(("g", "gv"), T=250, K=64, V=256, h0=True),
        slow((), T=333, K=256, V=64),
        slow(EVERY, T=300, K=80, V=96, split_size=128, h0=True),
        slow(EVERY, T=300, K=16, V=24, chunk_size=100),
        slow(("g", "gk"), T=400, K=192, V=72, raw=True, split_size=192),
        slow(("gk",), cu_seqlens=[0, 70, 70, 301, 303], K=128, V=64, h0=True),
        slow(("gk",), T=300, K=128, V=64, dtype=F16, states_in_fp32=True),
        slow(("gk", "gv"), T=300, K=130, V=70, dtype=np.float32),
    ],
)
def test_walks_of_many_tiles(gpu, gates, sizes):
    sizes = {"B": 1, "H": 2, "chunk_size": 64, "dtype": BF16, "raw": False, **sizes}
    check(gpu, *chunk_cases.make_case("walk", gates, **sizes).arguments(), config=SMALL)


def test_wide_blocks_and_64_bits_enabled(gpu):
    args, kwargs = chunk_cases.make_case("wide", ("gk",), B=1, T=130, H=1, K=128, V=128, dtype=BF16,
                                         chunk_size=64, raw=False).arguments()  # fmt: skip
    with jax.enable_x64(True):
        check(gpu, args, kwargs, {"block_v": 128, "num_stages": 1, "num_ctas": 1})


def test_rows_of_no_sequence_are_zero():
    args, kwargs = chunk_cases.make_case("traced", ("g",), cu_seqlens=[0, 21, 21, 37], K=8, V=8, dtype=BF16).arguments()
    run = registry.get("chunk_fwd_h", backend="mosaic_gpu")
    offsets = kwargs.pop("cu_seqlens")
    arrays = {name: value for name, value in kwargs.items() if hasattr(value, "dtype")}
    static = {name: value for name, value in kwargs.items() if name not in arrays}
    h, _ = jax.jit(lambda k, v, cu, arrays: run(k, v, cu_seqlens=cu, **arrays, **static))(*args, offsets, arrays)
    want = oracle(*args, cu_seqlens=offsets, **kwargs)[0]
    assert h.shape[1] > want.shape[1]
    assert_close(np.asarray(h)[:, : want.shape[1]], want, rtol(BF16), "h")
    assert not np.asarray(h)[:, want.shape[1] :].any()


def spec(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("device", ["b200", "a100"])
@pytest.mark.parametrize("op", ["chunk_fwd_h", "chunk_fwd_h_vjp"])
def test_devices_without_wgmma_are_refused(device, op):
    k = spec(1, 64, 2, 64)
    request = OP.request((k, k), {})
    implementation = next(found for found in mosaic_gpu.opmux_implementations() if found.op == op)
    asked = request if op == "chunk_fwd_h" else backward_request(OP, request)
    (reason,) = implementation.supports(asked, devices.device(device))
    assert (reason.code, reason.hint) == ("capability", "backend xla")
    assert "wgmma" in reason.detail


def test_64_bits_are_refused(gpu):
    with jax.enable_x64(True):
        k = spec(1, 64, 2, 64, dtype=np.float64)
        (reason,) = gpu("chunk_fwd_h").refusals(k, k)
    assert reason.code == "dtype"
    assert "float64" in reason.detail


@pytest.mark.parametrize("gates", [(), ("gk",), EVERY])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("channels", [16, 128, 256])
def test_default_configs_fit_in_shared_memory(gates, wide, channels):
    k = spec(8, 256, 32, channels)
    shapes = {"g": k.shape[:3], "g_gamma": k.shape[2:3], "gk": k.shape, "gv": k.shape}
    request = OP.request((k, k), {**{g: spec(*shapes[g], dtype=np.float32) for g in gates}, "states_in_fp32": wide})
    config = chunk_fwd_h_config.default_config(request, H200)
    assert smem_bytes(request, config) <= 226 * 1024
    assert config.num_ctas == 132


def test_what_does_not_fit_is_refused_before_it_is_lowered(gpu):
    k = np.zeros((1, 64, 1, 128), BF16)
    gate = np.zeros((1, 64, 1, 128), np.float32)
    with pytest.raises(ValueError, match="bytes of shared memory; a block has 231424 beside"):
        gpu("chunk_fwd_h")(k, k, gk=gate, config={"block_v": 128, "num_stages": 8})


def test_it_is_chosen_on_hopper_and_not_on_blackwell():
    k = np.zeros((1, 64, 1, 64), BF16)
    for device, backend in (("h200", "mosaic_gpu"), ("b200", "xla")):
        with registry.use(device=device):
            assert registry.explain("chunk_fwd_h", k, k).backend == backend
    assert ChunkFwdHConfig().num_ctas == 132

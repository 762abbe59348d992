"""Products and their cotangents in the simulator, against the float64 oracle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.core import devices
from opmux.core import op as core_op
from opmux.core.cases import matmul as matmul_cases
from opmux.core.ops import matmul as matmul_op
from opmux.core.simulation import SimulatorOptions
from opmux.plugins import mosaic_tpu
from opmux.plugins.mosaic_tpu.matmul_config import MatmulConfig, MatmulVjpConfig
from opmux.plugins.mosaic_tpu.simulator import simulate
from opmux.testing.oracle.matmul import matmul as oracle
from opmux.testing.tolerances import GRADIENT_FACTOR, assert_close, coarsest, rtol

IMPLEMENTATIONS = {found.op: found for found in mosaic_tpu.opmux_implementations()}
V6E = devices.device("tpu-v6e")
# In every mode memory that nobody wrote is NaN and races are looked for.
MODES = {
    "on_wait": SimulatorOptions(dma="on_wait"),
    "eager": SimulatorOptions(dma="eager"),
    "two_cores_seed_1": SimulatorOptions(cores=2, seed=1),
    "two_cores_seed_2": SimulatorOptions(cores=2, seed=2),
}
SMALL = MatmulConfig(block_m=16, block_n=128, block_k=128)
SMALL_VJP = MatmulVjpConfig(
    da_block_m=16, da_block_n=128, da_block_k=128, db_block_m=128, db_block_n=128, db_block_k=128
)
BF16 = np.dtype(jnp.bfloat16)


def normal(*shape, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed + sum(shape))
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-128, 128, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def check(run, a, b, config=None, options=None, tolerance=None, **kwargs):
    """The product itself."""
    got = run("matmul")(a, b, config=config, options=options, **kwargs)
    want = oracle(a, b, **kwargs)
    declared = jax.eval_shape(lambda: matmul_op.OP.call((a, b), kwargs).finish(_outputs(a, b, kwargs)))
    assert (got.shape, got.dtype) == (declared.shape, declared.dtype)
    assert_close(got, want, tolerance or rtol(coarsest([got], got.dtype), a.shape[-1]), "matmul")
    return got


def _outputs(a, b, kwargs):
    call = matmul_op.OP.call((a, b), kwargs)
    return matmul_op.OP.reference(call.request, call.operands)


def check_vjp(a, b, config=None, options=None, wanted=None, **kwargs):
    """Cotangents against products of the oracle in float64."""
    call = matmul_op.OP.call((a, b), kwargs)
    asked = core_op.backward_request(matmul_op.OP, call.request, wanted)
    implementation = IMPLEMENTATIONS["matmul_vjp"]
    assert not implementation.supports(asked, V6E)
    d_out = normal(*asked["d_out"].shape, seed=7).astype(asked["d_out"].dtype)
    operands = {**call.operands, "d_out": jnp.asarray(d_out)}
    config = config or implementation.config_for(asked, V6E)
    got = simulate(implementation.load(), asked, operands, config, options or SimulatorOptions())
    assert set(got) == set(asked.wanted)
    wide = {name: np.asarray(array).astype(np.float64) for name, array in operands.items()}
    full = {
        "a": oracle(wide["d_out"], np.swapaxes(wide["b"], -1, -2)),
        "b": oracle(np.swapaxes(wide["a"], -1, -2), wide["d_out"]),
    }
    for name, array in got.items():
        spec = asked[name]
        assert (array.shape, array.dtype) == (spec.shape, spec.dtype)
        axes = tuple(i for i, (m, n) in enumerate(zip(spec.shape, full[name].shape, strict=True)) if m != n)
        want = full[name].sum(axes, keepdims=True)
        terms = max(1, d_out.size)
        assert_close(array, want, GRADIENT_FACTOR * rtol(coarsest(operands.values()), terms), f"d_{name}")


def marked(name, slow):
    return pytest.param(name, marks=[pytest.mark.slow] * slow)


# Shapes of at least three blocks an axis with tails, every way in which batches broadcast, and columns.
BLOCKED = {
    "plain": ((37, 300), (300, 270)),
    "one_block_of_terms": ((37, 100), (100, 270)),
    "two_blocks_of_terms": ((21, 200), (200, 130)),
    "no_tail": ((48, 384), (384, 256)),
    "row": ((1, 300), (300, 270)),
    "column": ((270, 300), (300, 1)),
    "batch": ((3, 37, 140), (3, 140, 130)),
    "weights": ((3, 19, 140), (140, 130)),
    "weights_of_long_batches": ((3, 523, 140), (140, 130)),
    "batch_of_columns": ((19, 140), (3, 140, 130)),
    "broadcast_both": ((2, 1, 19, 140), (1, 3, 140, 130)),
    "broadcast_mixed": ((2, 1, 3, 18, 140), (2, 2, 1, 140, 130)),
    "columns_of_a_batch": ((2, 150, 140), (2, 140, 1)),
    "columns_that_share_a_matrix": ((150, 140), (3, 140, 1)),
}
QUICK = ("plain", "column", "broadcast_mixed")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[pytest.mark.slow] * (name not in QUICK or mode == "two_cores_seed_2"))
        for name, mode in itertools.product(BLOCKED, MODES)
    ],
)
def test_uneven_blocks(run, name, mode):
    a, b = (normal(*shape) for shape in BLOCKED[name])
    check(run, a, b, SMALL, MODES[mode])


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=[pytest.mark.slow] * (name not in QUICK or mode != "eager"))
        for name, mode in itertools.product(BLOCKED, MODES)
    ],
)
def test_cotangents_of_uneven_blocks(name, mode):
    a, b = (normal(*shape) for shape in BLOCKED[name])
    check_vjp(a, b, SMALL_VJP, MODES[mode])


@pytest.mark.parametrize(("given", "wanted"), [("bfloat16", None), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_sixteen_bits_are_rounded_once(run, given, wanted):
    a, b = normal(21, 300, dtype=np.dtype(given)), normal(300, 130, dtype=np.dtype(given))
    options = {} if wanted is None else {"preferred_element_type": wanted}
    check(run, a, b, SMALL, tolerance=1e-6 if wanted == "float32" else None, **options)
    check_vjp(a, b, SMALL_VJP, **options)


@pytest.mark.parametrize("native", [True, False], ids=["as_int8", "as_bfloat16"])
@pytest.mark.parametrize("wanted", ["int32", "float32", pytest.param(None, marks=pytest.mark.slow)])
def test_int8_is_exact(run, native, wanted):
    a, b = np.full((21, 2100), -128, np.int8), np.full((2100, 130), -128, np.int8)
    a[::2] += 1
    b[:, 1::2] = 127
    config = MatmulConfig(block_m=32, block_n=128, block_k=1152, int8_unit=native)
    options = {} if wanted is None else {"preferred_element_type": wanted}
    check(run, a, b, config, **options)


def error_of(run, precision):
    a, b = normal(21, 300), normal(300, 130)
    wide = a.astype(np.float64) @ b.astype(np.float64)
    return np.abs(np.asarray(run("matmul")(a, b, config=SMALL, precision=precision)) - wide).max() / np.abs(wide).max()


def test_a_precision_is_so_many_pieces(run):
    """The kernel makes the pieces itself, so the simulator shows what they are worth."""
    assert 1e-6 < error_of(run, "high") < 5e-5
    assert error_of(run, "highest") < 1e-6


def test_infinity_and_nan_at_the_highest_precision(run):
    a, b = normal(5, 300), normal(300, 7)
    a[2, 3], b[140, 1] = np.nan, np.inf
    check(run, a, b, SMALL, precision="highest")


def test_a_default_of_jax_counts_once(run):
    a, b = normal(21, 300), normal(300, 130)
    with jax.default_matmul_precision("highest"):
        check(run, a, b, SMALL)
        check_vjp(a, b, SMALL_VJP)


def test_only_what_is_wanted_is_computed():
    a, b = normal(19, 140), normal(140, 130)
    for wanted in (("a",), ("b",)):
        check_vjp(a, b, SMALL_VJP, wanted=wanted)


def test_same_values_with_64_bits_enabled(run):
    a, b = normal(19, 300), normal(300, 130)
    with jax.enable_x64(True):
        check(run, a, b, SMALL)
        check_vjp(a, b, SMALL_VJP)


@pytest.mark.parametrize("name", [marked(case.name, "long" in case.name) for case in matmul_cases.cases()])
def test_cases(run, refused, name):
    case = next(case for case in matmul_cases.cases() if case.name == name)
    args, kwargs = case.arguments()
    try:
        check(run, *args, tolerance=case.rtol, **kwargs)
        if jnp.issubdtype(jnp.result_type(*args), jnp.floating):
            check_vjp(*args, **kwargs)
    except refused as refusal:
        (reasons,) = refusal.args
        assert all(reason.code and reason.detail and reason.hint for reason in reasons)
        pytest.xfail(str(reasons[0].detail))

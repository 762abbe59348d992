"""Kernels with planted bugs: what the simulator says, as an error of ours, and that the next kernel runs clean.

Each in a child process: on JAX 0.10.2 an error in one warpgroup can leave the others waiting for ever.
"""

import pytest

PRELUDE = """
import jax, numpy as np
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from opmux.core.config import NoConfig
from opmux.core.errors import SimulationError
from opmux.core.ops.add import OP
from opmux.core.simulation import SimulatorOptions
from opmux.plugins.mosaic_gpu.simulator import simulate

def body(x_g, y_g, o_g, x_s, y_s, o_s, full, *, bug):
    warpgroup = lax.axis_index("wg")
    @pl.when(warpgroup == 1)
    def _():
        plgpu.copy_gmem_to_smem(x_g, x_s, full.at[0])
        plgpu.copy_gmem_to_smem(y_g, y_s, full.at[0])
        if bug == "two writers":
            o_s[...] = jnp.zeros((16, 128), jnp.float32)
    @pl.when(warpgroup == 0)
    def _():
        if bug != "missing wait":
            plgpu.barrier_wait(full.at[0])
        o_s[...] = x_s[...] + y_s[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s, o_g)
        plgpu.wait_smem_to_gmem(0)

def kernel(bug):
    def toy(request, operands, config):
        smem = plgpu.SMEM((16, 128), jnp.float32)
        run = plgpu.kernel(
            lambda *refs: body(*refs, bug=bug), out_type=jax.ShapeDtypeStruct((16, 128), jnp.float32), grid=(1,),
            grid_names=("i",), num_threads=2, thread_name="wg", kernel_name="toy",
            scratch_types=[smem, smem, smem, plgpu.Barrier(num_arrivals=2, num_barriers=1)],
            compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        )
        return {"out": run(operands["x"], operands["y"])}
    return toy

x = jnp.arange(16 * 128, dtype=jnp.float32).reshape(16, 128)
call = OP.call((x, x), {})

def run(bug, **options):
    return simulate(kernel(bug), call.request, call.operands, NoConfig(), SimulatorOptions(**options))["out"]

def fails(bug):
    try:
        run(bug)
    except Exception as error:
        return error
    raise AssertionError(f"{bug}: nothing was said")
"""


@pytest.mark.parametrize("bug", ["missing wait", "two writers"])
def test_a_planted_bug_is_an_error_and_the_next_kernel_runs_clean(child, bug):
    out = child(
        PRELUDE
        + f"""
error = fails({bug!r})
assert isinstance(error, SimulationError) and "toy" in error.kernel, error
print("RACE" if "RACE" in error.words else "BARRIER" if "barrier" in error.words.lower() else error.words)
np.testing.assert_array_equal(run(None), 2 * x)
"""
    )
    assert out.strip().splitlines()[-1] in (("RACE",) if bug == "two writers" else ("RACE", "BARRIER"))


def test_threads_share_one_program(child):
    child(
        PRELUDE
        + """
from opmux.core import compat
run(None)
found = compat._thread_program.cache_info()
assert found.misses == 1 <= found.hits, found
"""
    )


def test_inside_of_jit_it_is_the_text_of_an_error_of_jax(child):
    child(
        PRELUDE
        + """
def jitted(x):
    return simulate(kernel("two writers"), call.request, {"x": x, "y": x}, NoConfig(), SimulatorOptions())["out"]
try:
    jax.block_until_ready(jax.jit(jitted)(x))
except jax.errors.JaxRuntimeError as error:
    said = str(error)
assert "SimulationError" in said and "toy: failed in the simulator of its device: RACE DETECTED" in said, said
np.testing.assert_array_equal(jax.jit(lambda: run(None))(), 2 * x)
"""
    )


def test_a_race_is_not_looked_for_when_nobody_asks(child):
    child(PRELUDE + 'assert run("two writers", detect_races=False).shape == (16, 128)')


def test_a_kernel_that_cannot_be_traced_raises_its_own_error(child):
    child(
        PRELUDE
        + """
def broken(request, operands, config):
    raise KeyError("of the kernel")
try:
    simulate(broken, call.request, call.operands, NoConfig(), SimulatorOptions())
except KeyError as error:
    assert "of the kernel" in str(error)
else:
    raise AssertionError
np.testing.assert_array_equal(run(None), 2 * x)
"""
    )

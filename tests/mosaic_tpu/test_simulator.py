"""The simulator as a way to run: under every transform, after failures, and with bugs planted."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from opmux import registry
from opmux.core.config import NoConfig
from opmux.core.errors import SimulatedBackendWarning, SimulationError
from opmux.core.request import ArraySpec, Request
from opmux.core.simulation import SimulatorOptions
from opmux.plugins import mosaic_tpu
from opmux.plugins.mosaic_tpu.dense_config import AddConfig, ReduceConfig
from opmux.plugins.mosaic_tpu.simulator import simulate

X = np.arange(24 * 128, dtype=np.float32).reshape(24, 128)


@pytest.fixture
def add(run):
    runner = run("add")
    return lambda x, y: runner(x, y, config=AddConfig(block_lanes=128, block_rows=8))


def test_jit_scan_remat_and_vmap(add):
    np.testing.assert_array_equal(jax.jit(add)(X, X), 2 * X)
    batch = np.stack([X, X + 1])
    np.testing.assert_array_equal(jax.jit(jax.vmap(add, (0, None)))(batch, X), batch + X)
    total, _ = jax.jit(lambda x: jax.lax.scan(lambda total, _: (add(total, x), None), x, None, length=4))(X)
    np.testing.assert_array_equal(total, 5 * X)


def test_under_custom_vjp_and_remat(add):
    @jax.custom_vjp
    def op(x, y):
        return add(x, y)

    op.defvjp(lambda x, y: (op(x, y), None), lambda _, g: (add(g, g), g))
    np.testing.assert_array_equal(jax.jit(jax.grad(lambda x: op(x, x).sum()))(X), np.full_like(X, 3))
    np.testing.assert_array_equal(jax.jit(jax.grad(jax.checkpoint(lambda x: op(x, x).sum())))(X), np.full_like(X, 3))


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_shard_map(run, add, check_vma):
    mesh = Mesh(np.array(jax.devices()[:4]), ("d",))
    batch = np.stack([X + i for i in range(4)])

    def body(x):
        return add(x[0], x[0])[None] + run("reduce")(x, axis=1)[:, None]

    specs = {"in_specs": PartitionSpec("d"), "out_specs": PartitionSpec("d"), "check_vma": check_vma}
    got = jax.jit(jax.shard_map(body, mesh=mesh, **specs))(batch)
    np.testing.assert_allclose(got, 2 * batch + batch.sum(1, keepdims=True), rtol=1e-6)


def test_programs_in_flight_and_threads(add):
    program = jax.jit(lambda x: add(add(x, x), add(x, 2 * x)))
    pending = [program(X + i) for i in range(4)]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: np.asarray(program(X + i)), range(4)))
    for i, (one, other) in enumerate(zip(pending, found, strict=True)):
        np.testing.assert_array_equal(one, 5 * (X + i))
        np.testing.assert_array_equal(other, 5 * (X + i))


# Toy kernels with bugs. Each is a module-level function, since its name is what an error shows.


def whole(body, name, scratch=(), memory=pltpu.VMEM):
    def kernel(request, operands, config):
        x = operands["x"]
        out = pl.pallas_call(
            body,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            in_specs=[pl.BlockSpec(memory_space=memory)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=list(scratch),
            name=name,
        )(x)
        return {"out": out}

    kernel.__qualname__ = name
    return kernel


def _writes_what_a_copy_writes(x_ref, out_ref, semaphore):
    copy = pltpu.make_async_copy(x_ref, out_ref, semaphore)
    copy.start()
    out_ref[...] = jnp.zeros_like(out_ref)
    copy.wait()


def _reads_out_of_bounds(x_ref, out_ref):
    start = x_ref[0, 0].astype(jnp.int32) + x_ref.shape[0] - 4
    out_ref[0:8, :] = x_ref[pl.ds(start, 8), :]


def _forgets_to_write(x_ref, out_ref):
    out_ref[0:8, :] = x_ref[0:8, :]


def _waits_for_nobody(x_ref, out_ref, semaphore):
    pl.semaphore_wait(semaphore, 1)
    out_ref[...] = x_ref[...]


RACE = whole(_writes_what_a_copy_writes, "race", [pltpu.SemaphoreType.DMA])
BOUNDS = whole(_reads_out_of_bounds, "bounds")
UNWRITTEN = whole(_forgets_to_write, "unwritten")
HANG = whole(_waits_for_nobody, "hang", [pltpu.SemaphoreType.REGULAR])


def simulated(kernel, x, **options):
    request = Request("toy", (("x", ArraySpec.of(x)),), None, ("out",))
    return simulate(kernel, request, {"x": x}, NoConfig(), SimulatorOptions(**options))["out"]


def test_a_race_is_an_error_that_names_the_kernel():
    with pytest.raises(SimulationError, match=r"race: failed in the simulator of its device: RACE DETECTED") as caught:
        simulated(RACE, X)
    assert caught.value.kernel.endswith("race")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"SimulationError: .*race: .*RACE DETECTED"):
        jax.jit(lambda x: simulated(RACE, x))(X).block_until_ready()


def test_a_race_that_nobody_looks_for_is_none():
    assert simulated(RACE, X, detect_races=False).shape == X.shape


def test_a_read_out_of_bounds_is_an_error():
    with pytest.raises(SimulationError, match=r"(?i)bounds: .*out.of.bounds"):
        simulated(BOUNDS, X)


def test_memory_that_nobody_wrote_is_nan_or_zero():
    assert np.isnan(simulated(UNWRITTEN, X)[8:]).all()
    assert not np.asarray(simulated(UNWRITTEN, X, uninitialized="zero"))[8:].any()


def test_late_and_early_copies_are_made_by_one_program_and_found_out_by_one():
    traced = []

    def reads_too_early(x_ref, out_ref, semaphore):
        traced.append(out_ref)
        copy = pltpu.make_async_copy(x_ref, out_ref, semaphore)
        copy.start()
        seen = out_ref[...]
        copy.wait()
        out_ref[...] = seen

    kernel = whole(reads_too_early, "early", [pltpu.SemaphoreType.DMA])
    late = simulated(kernel, X, dma="on_wait", detect_races=False)
    times = len(traced)
    early = simulated(kernel, X, dma="eager", detect_races=False)
    assert np.isnan(late).all()
    assert (early == X).all()
    assert len(traced) == times


def test_after_a_failure_the_next_kernel_runs_clean(add):
    program = jax.jit(add)
    program(X, X)
    for _ in range(2):
        for kernel in (RACE, BOUNDS):
            with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?i)RACE|bounds"):
                jax.jit(lambda x, kernel=kernel: simulated(kernel, x))(X).block_until_ready()
            np.testing.assert_array_equal(program(X, X), 2 * X)


def test_an_error_while_tracing_is_the_users_to_see():
    def broken(request, operands, config):
        raise ZeroDivisionError("in the kernel")

    with pytest.raises(ZeroDivisionError, match="in the kernel"):
        simulated(broken, X)


def test_two_kernels_in_one_call_and_a_race_in_the_first_only():
    def both(request, operands, config):
        once = RACE(request, operands, config)["out"]
        return UNWRITTEN(request, {"x": once}, config)

    with pytest.raises(SimulationError, match="RACE DETECTED"):
        simulated(both, X)


@pytest.mark.slow
def test_a_wait_for_a_signal_that_nobody_sends_hangs():
    """So whoever simulates kernels that are not trusted does it in a child process with a time limit."""
    child = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("toys", {__file__!r})
toys = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toys)
print("simulates", flush=True)
toys.simulated(toys.HANG, toys.X).block_until_ready()
"""
    with pytest.raises(subprocess.TimeoutExpired) as expired:
        subprocess.run([sys.executable, "-c", child], timeout=20, check=True, stdout=subprocess.PIPE)
    assert expired.value.stdout == b"simulates\n", "it took all its time to start"


@pytest.fixture
def forced(isolated_registry):
    if "mosaic_tpu" not in registry.backends():
        registry.register(mosaic_tpu, name="mosaic_tpu")
    with pytest.warns(SimulatedBackendWarning):
        registry.get("add", backend="mosaic_tpu")(1.0, 2.0)
    return lambda op, config=None: registry.get(op, backend="mosaic_tpu", config=config)


def test_gradients_and_vmap_through_the_registry(forced):
    add = forced("add", AddConfig(block_lanes=128, block_rows=8))
    reduce = forced("reduce", ReduceConfig(block_size=128 * 128, block_r=128, block_b=128, strip_lanes=128))
    y = X[:1]

    def loss(x, y):
        return reduce(add(x, y) ** 2, axis=0).sum()

    got = jax.jit(jax.grad(loss, (0, 1)))(X, y)
    np.testing.assert_allclose(got[0], 2 * (X + y), rtol=1e-6)
    np.testing.assert_allclose(got[1], (2 * (X + y)).sum(0, keepdims=True), rtol=1e-6)
    batch = np.stack([X, X + 1])
    np.testing.assert_allclose(jax.vmap(lambda x: reduce(x, axis=1))(batch), batch.sum(2), rtol=1e-6)

"""The one place where opmux bridges differences between JAX versions and reaches below its public API."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Callable, Generator, Hashable, Iterable
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.core
import numpy as np
from jax._src import config
from jax._src.core import Primitive as Primitive  # that of jax.extend.core, whose import brings Pallas
from jax._src.core import trace_state_clean
from jaxlib import xla_client

if TYPE_CHECKING:
    from jaxlib._jax import Device as JaxDevice
else:
    JaxDevice = jax.Device


def is_traced(value: Any) -> bool:
    """Whether a value is a tracer, whose elements are not known."""
    return isinstance(value, jax.core.Tracer)


def has_manual_axes(array: Any) -> bool:
    """Whether an array is traced inside `shard_map` with its replication checks on.

    Interpreted Pallas kernels cannot run there: their bodies mix values that vary over the mesh with
    constants that do not.
    """
    if not is_traced(array):
        return False
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return kind is not None and bool(getattr(kind, "varying", ()))


def trace_is_clean() -> bool:
    """Whether no JAX transformation is being traced in this thread."""
    return trace_state_clean()


def trace_context() -> Hashable:
    """Everything that the caches of JAX know a trace by besides its arguments."""
    return config.trace_context()


def device_platform(device: Any) -> str:
    """The platform of a device as lowering names it: `cuda` or `rocm` where JAX says `gpu`.

    Takes a `jax.Device`, whose runtime tells the two apart, or an abstract device, which has only its kind.
    """
    platform = str(device.platform)
    if platform != "gpu":
        return platform
    runtime = str(getattr(getattr(device, "client", None), "platform_version", ""))
    amd = "rocm" in runtime.lower() or re.match(r"AMD|gfx|Radeon", str(device.device_kind))
    return "rocm" if amd else "cuda"


def local_devices() -> list[JaxDevice]:
    """One list of this process's devices of every platform, the default backend's first."""
    found = list(jax.local_devices())
    for platform in ("cuda", "rocm", "tpu", "cpu"):
        try:
            found += jax.local_devices(backend=platform)
        except RuntimeError:  # the platform is not present
            continue
    return found


def default_device() -> JaxDevice:
    """The device that uncommitted arrays go to: `jax.default_device`, else the default backend's first."""
    chosen: Any = jax.config.values["jax_default_device"]
    if isinstance(chosen, JaxDevice):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def mesh_device() -> Any | None:
    """The abstract device of the mesh that a trace runs under, if there is one."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)


def has_mesh() -> bool:
    """Whether a trace runs under a mesh."""
    return not jax.sharding.get_abstract_mesh().empty


def traced_for(kind: str, platform: str, cores: int) -> contextlib.AbstractContextManager[Any]:
    """A scope in which kernels are traced for a device that is not there.

    Pallas asks the mesh what device it traces for, for index arithmetic of TPU kernels (`//`, `%`) among others,
    and takes the default device where there is no mesh.

    Args:
      kind: what `jax.Device.device_kind` prints for the device.
      platform: JAX platform of the device.
      cores: cores of the device.
    """
    device = jax.sharding.AbstractDevice(kind, cores, "gpu" if platform in ("cuda", "rocm") else platform)
    # Auto axes, since arrays that are traced inside belong to no mesh.
    auto = (jax.sharding.AxisType.Auto,)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("device",), auto, abstract_device=device))


def varying_axes(arrays: Iterable[Any]) -> frozenset[str]:
    """Axes of a `shard_map` over which any of the arrays is known to vary."""
    kinds = [getattr(jax.typeof(array), "manual_axis_type", None) for array in arrays]
    return frozenset[str]().union(*(getattr(kind, "varying", ()) for kind in kinds))


def vary_like(array: jax.Array, others: Iterable[Any]) -> jax.Array:
    """The array, marked as varying over every axis of a `shard_map` over which one of the others varies."""
    missing = varying_axes(others) - varying_axes([array])
    return jax.lax.pcast(array, tuple(sorted(missing)), to="varying") if missing else array


@cache
def _simulation_client() -> Any:
    from unittest import mock

    # Simulated threads wait for one another in callbacks, and may hold every thread of XLA's pool, which is as large
    # as the machine has cores. The one that they wait for needs another if XLA runs parts of it side by side.
    with mock.patch.dict(os.environ, {"PJRT_NPROC": os.environ.get("PJRT_NPROC", "32")}):
        return xla_client.make_cpu_client(asynchronous=False, num_devices=1)


QUICK: dict[str, Any] = {"xla_backend_optimization_level": 0}
"""Compiler options for programs that are run once, on small arrays, on a CPU: half the time to compile."""

_compiling = threading.Lock()


@lru_cache(maxsize=64)
def _thread_program(jaxpr: Any, tree: Any, specs: tuple[jax.ShapeDtypeStruct, ...]) -> Callable[..., Any]:
    """What the threads of a simulated kernel run, compiled for all of them and for later runs of the kernel."""
    consts, args = jax.tree.unflatten(tree, specs)
    return jax.jit(partial(jax.core.eval_jaxpr, jaxpr)).lower(consts, *args).compile(QUICK)


def simulation_client() -> contextlib.AbstractContextManager[Any]:
    """A scope in which programs are traced for, and run on, a CPU client of their own.

    A host callback that ran a program on JAX's own CPU client could wait for ever: for a full pool, or for its caller.
    """
    return jax.default_device(_simulation_client().devices()[0])


@contextlib.contextmanager
def simulation_threads() -> Generator[None]:
    """A scope in which the threads that simulators start run on that client as well, one program for all of them.

    What they call the host with stays in NumPy. For one thread at a time, as the simulators themselves are.
    """
    from unittest import mock

    from jax._src import callback as callbacks
    from jax._src.pallas.mosaic.interpret import thread_map

    call_host = callbacks.io_callback_impl

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        with simulation_client():
            leaves, tree = jax.tree.flatten((consts, args))
            with _compiling:
                program = _thread_program(jaxpr, tree, tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves))
            program(consts, *args)
            jax.effects_barrier()  # the program may have gone on in the pool; the simulator counts on its end

    def call(*args: Any, callback: Any, result_avals: Any, **params: Any) -> Any:
        module = getattr(getattr(callback.callback_func, "func", callback.callback_func), "__module__", "")
        if not re.search(r"pallas\.mosaic.*\.(interpret_pallas_call|gpu_callbacks)$", module):
            return call_host(*args, callback=callback, result_avals=result_avals, **params)
        # To put every argument on a device and take it off again is most of what a callback costs.
        found = callback(*(x.item() if x.ndim == 0 and x.dtype.kind == "i" else x for x in map(np.array, args)))
        return [np.asarray(x, aval.dtype) for x, aval in zip(found, result_avals, strict=True)]

    with mock.patch.object(thread_map, "_run_jaxpr", run), mock.patch.object(callbacks, "io_callback_impl", call):
        yield


def tpu_simulator(
    *, detect_races: bool, uninitialized: str, seed: int | None, cores: int
) -> contextlib.AbstractContextManager[None]:
    """A scope in which `pallas_call` is traced for a simulated TPU; a read out of bounds raises."""
    from jax.experimental.pallas import tpu as pltpu

    options: dict[str, Any] = {
        "detect_races": detect_races, "uninitialized_memory": uninitialized,
        "random_seed": seed, "num_cores_or_threads": cores, "out_of_bounds_reads": "raise",
    }  # fmt: skip
    return pltpu.force_tpu_interpret_mode(_tpu_params()(**options))


@cache
def _tpu_params() -> Any:
    from jax.experimental.pallas import tpu as pltpu

    # Asked when a kernel starts, so that one program serves all of `tpu_copies`.
    asked = property(lambda self: _copies, lambda self, value: None)
    return type("Params", (pltpu.InterpretParams,), {"dma_execution_mode": asked})


_copies = "on_wait"


@contextlib.contextmanager
def tpu_copies(when: str) -> Generator[None]:
    """A scope in which simulated TPU kernels copy `on_wait` or `eager`; for one thread at a time."""
    from unittest import mock

    with mock.patch(f"{__name__}._copies", when):
        yield


def reset_tpu_simulator() -> None:
    """Clears what a simulated TPU kernel that failed has left behind."""
    from jax.experimental.pallas import tpu as pltpu

    pltpu.reset_tpu_interpret_mode_state()


def tpu_races() -> contextlib.AbstractContextManager[Callable[[], bool]]:
    """Gives a function: whether a TPU kernel simulated inside of this scope had a race that did not raise."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return _recorded_races(interpret_pallas_call, "RaceDetectionState")


@contextlib.contextmanager
def _recorded_races(module: Any, state: str) -> Generator[Callable[[], bool]]:
    """Gives a function: whether a race was recorded, by a simulator's module, inside of this scope.

    Newer JAX raises. Older JAX records, in an object that each kernel replaces by one of its own; so all of them
    are kept. For one thread at a time, as the simulator itself is.
    """
    from unittest import mock

    original = getattr(module, state)
    made: list[Any] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append(original(*args, **kwargs))
        return made[-1]

    with mock.patch.object(module, state, recorded):
        yield lambda: any(state.races_found for state in made)


def gpu_simulator(
    *, detect_races: bool, uninitialized: str, tma_threads: int
) -> contextlib.AbstractContextManager[None]:
    """A scope in which `plgpu.kernel` is simulated on a GPU; a read out of bounds raises, except by TMA."""
    # Where plgpu does not export these, they are there all the same.
    from jax._src.pallas.mosaic_gpu.interpret import params

    options: dict[str, Any] = {
        "detect_races": detect_races, "uninitialized_memory": uninitialized, "out_of_bounds_reads": "raise",
        "num_tma_threads_per_device": tma_threads,
    }  # fmt: skip
    return params.force_gpu_interpret_mode(params.InterpretGPUParams(**options))


def in_gpu_simulator() -> bool:
    """Whether a Pallas kernel that is traced now will be simulated on a GPU."""
    return config.pallas_tpu_interpret_mode_context_manager.value is not None  # of TPU and GPU alike


def gpu_simulator_clips_tma() -> bool:
    """Whether the simulator's TMA fills with zeros past the end of an array, and stores nothing there, as a GPU's."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return hasattr(plgpu, "InterpretGPUParams")


def gpu_simulator_transposes() -> bool:
    """Whether the simulator's `wgmma` takes operands that are transposed views."""
    return gpu_simulator_clips_tma()  # both came with the same version


def reset_gpu_simulator() -> None:
    """Clears what a simulated GPU kernel that failed has left behind."""
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    interpret_pallas_call.reset_gpu_interpret_mode_state()


def gpu_races() -> contextlib.AbstractContextManager[Callable[[], bool]]:
    """Gives a function: whether a GPU kernel simulated inside of this scope had a race that did not raise."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    own = "GPURaceDetectionState"
    return _recorded_races(gpu_callbacks, own if hasattr(gpu_callbacks, own) else "RaceDetectionState")

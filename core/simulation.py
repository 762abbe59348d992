"""How a kernel is simulated: one set of options, and one way to run, for every simulator.

JAX's simulators keep the state of their device in the process and order their steps by side effects, which
`jax.custom_vjp`, `jax.checkpoint` and programs of several devices refuse. So a simulated kernel is a program of its
own, which the user's program calls:

    user's program (any transform)        the host, one kernel at a time
      operands ─── pure_callback ───►  run the kernel's program on a CPU client of its own
                                       ├─ it raised, or races were recorded: clear the state, raise SimulationError
      outputs  ◄──────────────────────  └─ outputs
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from opmux.core import compat
from opmux.core.config import Config
from opmux.core.errors import SimulationError
from opmux.core.request import Operands, Outputs, Request

Simulate = Callable[[Any, Request, Operands, Config, "SimulatorOptions"], Outputs]
"""A backend's simulator: `(kernel, request, operands, config, options) -> outputs`, run on a CPU."""


@dataclass(frozen=True, slots=True)
class SimulatorOptions:
    """Options of a simulator; each simulator heeds those that its device has.

    Attributes:
      detect_races: report two accesses to one place that nothing orders.
      uninitialized: what memory holds before it is written.
      dma: TPU: copies happen when they are waited for, or as soon as they are started. The same program does both, so
        that the second costs no more than to run it.
      seed: TPU: order of the grid points along parallel axes; None is the order of the grid.
      cores: TPU: cores of the simulated device; GPU: not used.
      tma_threads: GPU: how many TMA copies may be under way unordered; few hide races between copies.
    """

    detect_races: bool = True
    uninitialized: Literal["nan", "zero"] = "nan"
    dma: Literal["on_wait", "eager"] = "on_wait"
    seed: int | None = None
    cores: int = 1
    tma_threads: int = 32


@dataclass(frozen=True)
class Simulator:
    """Runs kernels in one of JAX's simulators; works under every transform.

    Attributes:
      scope: Pallas kernels that are traced inside of this context are simulated.
      reset: clears what a kernel that failed has left behind.
      races: a context that gives a function: whether any kernel run inside had a race that was only recorded.
      copies: a context in which the copies of a kernel that runs happen as `dma` says. With it, `scope` need not heed
        that, and programs that are the same but for that are one.
      wide: whether it runs programs that are traced with 64 bits enabled.
    """

    scope: Callable[[SimulatorOptions], AbstractContextManager[None]]
    reset: Callable[[], None]
    races: Callable[[], AbstractContextManager[Callable[[], bool]]]
    copies: Callable[[str], AbstractContextManager[None]] | None = None
    wide: bool = True

    def __call__(
        self, kernel: Any, request: Request, operands: Operands, config: Config, options: SimulatorOptions
    ) -> Outputs:
        """Runs a kernel in the simulator.

        An error while the kernel is traced is raised as it is. One while it runs is a `SimulationError`; where the
        operands are traced, as inside `jax.jit`, JAX makes it the text of a `jax.errors.JaxRuntimeError`.

        Args:
          kernel: the kernel, `(request, operands, config) -> outputs`.
          request: the request.
          operands: its canonical operands; tracers are fine.
          config: the kernel's config.
          options: options of the simulator.

        Raises:
          SimulationError: the simulator raised, or found a race.
        """
        # Of this thread; the host has threads of its own.
        wide = self.wide and jax.dtypes.canonicalize_dtype(np.int64).itemsize == 8
        traced = options if self.copies is None else replace(options, dma="on_wait")
        with jax.enable_x64(wide):
            key: Any = (self, kernel, request, config, traced, compat.trace_context())
            program = _Program(*key)
        if not any(spec.size for spec in program.specs.values()):
            empty = {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in program.specs.items()}
            return {name: compat.vary_like(array, operands.values()) for name, array in empty.items()}

        def host(operands: Operands) -> dict[str, np.ndarray]:
            with (
                _one_at_a_time, compat.simulation_client(), jax.enable_x64(wide), compat.simulation_threads(),
                nullcontext() if self.copies is None else self.copies(options.dma), self.races() as raced,
            ):  # fmt: skip
                try:
                    # By way of NumPy: an array of JAX's own client would bring the program there.
                    given = {name: jnp.asarray(np.asarray(array)) for name, array in operands.items()}
                    found = program.compiled(given)
                    outputs = {name: np.asarray(array) for name, array in found.items()}
                except Exception as error:
                    self.reset()
                    raise SimulationError(_name(kernel), _words(error)) from error
                if raced():
                    raise SimulationError(_name(kernel), "RACE DETECTED; the simulator printed where")
                return outputs

        if compat.trace_is_clean() and not any(map(compat.is_traced, operands.values())):
            return {name: jnp.asarray(array) for name, array in host(operands).items()}
        outputs = jax.pure_callback(host, program.specs, dict(operands), vmap_method="sequential")
        return {name: compat.vary_like(array, operands.values()) for name, array in outputs.items()}


# The simulated device is one for the whole process.
_one_at_a_time = threading.Lock()


# A process may map 65,530 pieces of memory on Linux, and a program takes hundreds: what compiles then crashes.
@lru_cache(maxsize=64)
class _Program:
    """A kernel, traced at once and compiled when it first runs: the same one for the same question.

    Jitted functions would not do: JAX's caches know them by everything that may change from call to call, such as
    how copies happen, which the program does not depend on.
    """

    def __init__(
        self, simulator: Simulator, kernel: Any, request: Request, config: Config, options: SimulatorOptions,
        context: Hashable,
    ):  # fmt: skip
        def run(operands: Operands) -> Outputs:
            with simulator.scope(options):
                outputs = kernel(request, operands, config)
            return {name: outputs[name] for name in request.wanted}

        self._traced = jax.jit(run).trace(request.structs())
        self.specs = {
            name: jax.ShapeDtypeStruct(info.shape, info.dtype) for name, info in self._traced.out_info.items()
        }

    @cached_property
    def compiled(self) -> Callable[[Operands], Outputs]:
        """The program, for the device of the thread that asks first."""
        return self._traced.lower().compile(compat.QUICK)


def _name(kernel: Any) -> str:
    return f"{getattr(kernel, '__module__', '')}:{getattr(kernel, '__qualname__', kernel)}"


def _words(error: Exception) -> str:
    """What the simulator said, without the traceback of the callback that it said it in."""
    said = [match.end() for match in re.finditer(r"^(?:\w+\.)*\w*(?:Error|Exception): ", str(error), re.MULTILINE)]
    return (str(error)[said[-1] :] if said else f"{type(error).__name__}: {error}").strip()

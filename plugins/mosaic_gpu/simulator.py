"""Runs this backend's kernels in JAX's simulator of a GPU."""

from __future__ import annotations

import contextlib

from opmux.core import compat
from opmux.core.simulation import Simulator, SimulatorOptions


def _scope(options: SimulatorOptions) -> contextlib.AbstractContextManager[None]:
    return compat.gpu_simulator(
        detect_races=options.detect_races, uninitialized=options.uninitialized, tma_threads=options.tma_threads
    )


# With 64 bits enabled the simulator takes the 32-bit start of a loop inside of a condition for one of 64.
simulate = Simulator(scope=_scope, reset=compat.reset_gpu_simulator, races=compat.gpu_races, wide=False)
"""The simulator: warpgroups, shared memory, barriers and TMA; `docs/gpu.md` has what it does not see."""

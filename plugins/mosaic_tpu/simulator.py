"""The simulator of a TPU: VMEM, SMEM, DMAs, semaphores and cores, on a CPU."""

from __future__ import annotations

from contextlib import AbstractContextManager

from opmux.core import compat
from opmux.core.simulation import Simulator, SimulatorOptions


def _scope(options: SimulatorOptions) -> AbstractContextManager[None]:
    return compat.tpu_simulator(
        detect_races=options.detect_races,
        uninitialized=options.uninitialized,
        seed=options.seed,
        cores=options.cores,
    )


simulate = Simulator(scope=_scope, reset=compat.reset_tpu_simulator, races=compat.tpu_races, copies=compat.tpu_copies)
"""Runs a kernel of this backend in JAX's TPU interpret mode; see `opmux.core.simulation.Simulator`."""

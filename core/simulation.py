"""How a kernel is simulated: one set of options for every simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from opmux.core.config import Config
from opmux.core.request import Operands, Outputs, Request

Simulate = Callable[[Any, Request, Operands, Config, "SimulatorOptions"], Outputs]
"""A backend's simulator: `(kernel, request, operands, config, options) -> outputs`, run on a CPU."""


@dataclass(frozen=True, slots=True)
class SimulatorOptions:
    """Options of a simulator; each simulator heeds those that its device has.

    Attributes:
      detect_races: report two accesses to one place that nothing orders.
      uninitialized: what memory holds before it is written.
      dma: TPU: copies happen when they are waited for, or as soon as they are started.
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

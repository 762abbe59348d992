"""How blocks stream past the two compute warpgroups of the backward attention kernels.

There is no memory warpgroup: two warpgroups may have 255 registers a thread, whatever the compiler makes of
`setmaxnreg`, and two accumulators and two blocks of scores need most of them. Warpgroup 0 starts the copies, as many
steps ahead as there are stages but two, so that it seldom has to wait for the other one:

    step            i: both read slot i            full[slot]: has arrived
    warpgroup 0     i: copies step i + ahead       empty[slot]: both have read step i + ahead - stages
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.plugins.mosaic_gpu.pallas import count, drain


@dataclass(frozen=True)
class Stream:
    """The blocks of one tile.

    Attributes:
      copy: starts the copies of a step into a slot.
      steps: how many blocks there are.
      done: steps of the tiles before.
      stages: slots.
      full: has one phase for each step that has arrived.
      empty: has one phase for each step that both warpgroups have read.
    """

    copy: Callable[[Any, Any], None]
    steps: Any
    done: Any
    stages: int
    full: Any
    empty: Any

    @property
    def ahead(self) -> int:
        """How many steps ahead copies are started."""
        return max(min(1, self.stages - 1), self.stages - 2)

    def start(self) -> None:
        """Starts the first copies."""
        for step in range(self.ahead):
            self._copy(step)

    def take(self, step: Any) -> Any:
        """Waits for the blocks of a step, with the next copies under way; returns their slot."""
        self._copy(step + self.ahead)
        slot = slot_of(self.done + step, self.stages)
        plgpu.barrier_wait(self.full.at[slot])
        return slot

    def release(self, slot: Any) -> None:
        """Hands a slot back; what was read of it as values, other than by `wgmma`, has to be committed before."""
        plgpu.barrier_arrive(self.empty.at[slot])

    def _copy(self, step: Any) -> None:
        if isinstance(step, int) and isinstance(self.steps, int) and step >= self.steps:
            return
        number = self.done + step

        @pl.when((lax.axis_index("wg") == 0) & (step < self.steps))
        def _() -> None:
            slot = slot_of(number, self.stages)
            pl.when(number >= self.stages)(lambda: plgpu.barrier_wait(self.empty.at[slot]))
            self.copy(jnp.int32(step), slot)  # only a traced window may reach past the end, where TMA ends


def slot_of(number: Any, stages: int) -> Any:
    """The slot of a step, counted over all tiles."""
    return number % stages if isinstance(number, int) else lax.rem(number, stages)


def over_tiles(tiles: int, ctas: int, body: Callable[[Any, Any], Any]) -> Any:
    """Calls `body(tile, steps of the tiles before)`, which returns its steps, for each tile of a block of threads.

    Returns:
      The steps of all its tiles.
    """
    cta = lax.axis_index("cta")
    if ctas == tiles:
        return body(cta, 0)
    number = count(cta, tiles, ctas)
    return lax.fori_loop(0, number, lambda i, done: done + jnp.int32(body(cta + i * ctas, done)), jnp.int32(0))


def finish(empty: Any, steps: Any, stages: int) -> None:
    """Lets warpgroup 0 see the last phases of `empty`, and every warpgroup its last stores."""
    pl.when(lax.axis_index("wg") == 0)(lambda: drain(empty, steps, stages))
    plgpu.wait_smem_to_gmem(0)

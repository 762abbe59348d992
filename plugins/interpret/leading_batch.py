"""`vmap` of an interpreted kernel as one call of the kernel on arrays with one more axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap


def leading_batch(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Makes `vmap` hand its batch to the function as a leading axis, of length 1 where an array has no batch.

    Left to itself, `vmap` adds a grid axis to a Pallas call, and an interpreted grid is a loop: a hundred times
    slower than one block that holds the batch.

    Args:
      function: takes arrays of one rank, or of any higher one with leading axes that are equal or 1, and returns an
        array with those leading axes broadcast.
    """
    run = custom_vmap(function)

    @run.def_vmap
    def batch(size: int, batched: list[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        leading = (array if has_batch else array[None] for array, has_batch in zip(arrays, batched, strict=True))
        return leading_batch(function)(*leading), True

    run_as_function: Any = run
    return run_as_function

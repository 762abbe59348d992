"""The one place where opmux bridges differences between JAX versions and reaches below its public API."""

from __future__ import annotations

from typing import Any

import jax


def has_manual_axes(array: Any) -> bool:
    """Whether an array is traced inside `shard_map` with its replication checks on.

    Interpreted Pallas kernels cannot run there: their bodies mix values that vary over the mesh with
    constants that do not.
    """
    if not isinstance(array, jax.core.Tracer):
        return False
    kind = getattr(jax.typeof(array), "manual_axis_type", None)
    return kind is not None and bool(getattr(kind, "varying", ()))

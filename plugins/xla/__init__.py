"""The `xla` backend: the reference of each op, in plain `jax.numpy`, on any platform.

JAX differentiates these itself, in both modes.
"""

from __future__ import annotations

from collections.abc import Iterable

from opmux.core.implementation import BackendInfo, Implementation
from opmux.registry import hookimpl

_OPS = ("add", "attention", "chunk_fwd_h", "matmul", "reduce")


@hookimpl
def opmux_backend() -> BackendInfo:
    """What the backend is."""
    return BackendInfo("xla", summary="plain jax.numpy, compiled by XLA", tier="reference")


@hookimpl
def opmux_implementations() -> Iterable[Implementation]:
    """One implementation an op."""
    return [Implementation(op=op, kernel=f"opmux.plugins.xla.reference:{op}", forward_mode=True) for op in _OPS]

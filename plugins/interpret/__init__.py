"""The `interpret` backend: portable Pallas kernels in interpret mode, on any platform."""

from __future__ import annotations

from collections.abc import Iterable

from opmux.core.implementation import BackendInfo, Implementation
from opmux.registry import hookimpl


@hookimpl
def opmux_backend() -> BackendInfo:
    """What the backend is."""
    return BackendInfo("interpret", summary="Pallas kernels in interpret mode", tier="interpret")


@hookimpl
def opmux_implementations() -> Iterable[Implementation]:
    """One implementation an op."""
    return []

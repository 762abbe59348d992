"""The hooks of a plugin. pluggy carries registration only: nothing is dispatched through it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pluggy

from opmux.core.implementation import BackendInfo, Implementation
from opmux.core.op import Op
from opmux.core.request import Request

PROJECT = "opmux"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def opmux_backend() -> BackendInfo:  # pyright: ignore[reportReturnType]
    """Says what the backend is. A plugin that registers implementations must have it."""


@hookspec
def opmux_implementations() -> Iterable[Implementation]:  # pyright: ignore[reportReturnType]
    """Lists the backend's implementations: plain data; kernels are imported when first chosen."""


@hookspec
def opmux_ops() -> Iterable[Op]:  # pyright: ignore[reportReturnType]
    """Lists ops that the plugin adds."""


@hookspec
def opmux_rank(op: str, request: Request, candidates: Sequence[str]) -> Sequence[str] | None:
    """Reorders viable backends of one automatic choice, best first; None for no opinion.

    Backends that it leaves out keep their order behind those that it names. It is consulted once for each
    new request, never on a warm call. The first plugin with an opinion, by name, counts.
    """

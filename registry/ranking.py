"""The order of viable backends, where nothing is forced.

    prefer lists > opmux_rank > priority for this request and device > narrower priority entry > built-in first > name

A total order: it depends on neither the order of registration nor the file system.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from opmux.core.devices import Device
from opmux.core.errors import PluginError, PluginWarning
from opmux.core.request import Request
from opmux.registry import tables
from opmux.registry.candidates import Considered
from opmux.registry.policy import Policy


def ordered(
    considered: list[Considered], op: str, request: Request, device: Device, policy: Policy
) -> tuple[list[Considered], str]:
    """Viable backends best first, then the others by name; and why the first one is first."""
    viable = sorted((found for found in considered if found.choice is not None), key=lambda found: found.name)
    others = sorted((found for found in considered if found.choice is None), key=lambda found: found.name)
    hooked = _by_hook(op, request, tuple(found.name for found in viable), policy)

    def rank(found: Considered) -> tuple[Any, ...]:
        assert found.choice is not None
        implementation = found.choice.implementation
        return (
            _place(found.name, policy.preferred),
            _place(found.name, hooked),
            -found.candidate.priority,
            -implementation.narrowness_on(device),
            not implementation.builtin,
            found.name,
        )

    viable.sort(key=rank)
    return viable + others, _why_first([rank(found) for found in viable], viable)


def _place(name: str, names: Sequence[str]) -> int:
    return names.index(name) if name in names else len(names)


_WHY = (
    "preferred", "ranked first by a plugin's opmux_rank hook", "", "its priority names this device more narrowly",
    "built in, at an equal priority", "first by name, at an equal priority",
)  # fmt: skip


def _why_first(ranks: list[tuple[Any, ...]], viable: list[Considered]) -> str:
    """Why the first of the viable backends is before the second: the first figure in which they differ."""
    if len(viable) < 2:
        return "the only viable backend" if viable else ""
    best, second = viable[0], viable[1]
    decisive = next(place for place, (one, other) in enumerate(zip(*ranks[:2], strict=True)) if one != other)
    where = "for this request" if any(map(_depends_on_request, (best, second))) else "on this device"
    return _WHY[decisive] or (
        f"highest priority {where}, {best.candidate.priority} against {second.candidate.priority} of {second.name}"
    )


def _depends_on_request(found: Considered) -> bool:
    choice = found.choice
    if choice is None or choice.device is None:
        return False
    return found.candidate.priority != choice.implementation.priority_on(choice.device)


def _by_hook(op: str, request: Request, names: tuple[str, ...], policy: Policy) -> list[str]:
    """The opinion of the first plugin that has one."""
    if len(names) < 2:
        return []
    for plugin in tables.loader.load_all(policy.disabled, strict=policy.strict):
        if plugin.contents.rank is None:
            continue
        try:
            opinion: Any = plugin.contents.rank(op=op, request=request, candidates=names)
            if opinion is not None and (isinstance(opinion, str) or not isinstance(opinion, Sequence)):
                raise TypeError(f"it gave {opinion!r}, not a sequence of backend names")
        except Exception as cause:
            what = f"plugin {plugin.name!r}: opmux_rank raised {type(cause).__name__}: {cause}"
            if policy.strict:
                raise PluginError(what) from cause
            warnings.warn(f"{what}; its opinion is left out", PluginWarning, stacklevel=2)
            continue
        if opinion is not None:
            return [name for name in dict.fromkeys(opinion) if name in names]
    return []

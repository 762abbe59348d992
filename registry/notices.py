"""What a user is told once: a slow choice on an accelerator, a kernel that runs in a simulator."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from opmux.core.devices import Device
from opmux.core.errors import PluginWarning, SimulatedBackendWarning, SlowPathWarning, near_matches

_told: set[Any] = set()


def report(found: Any, device: Device) -> None:
    """Warns about a plan if there is something to say that was not said before in this process."""
    decision = found.decision
    if not decision.backend:
        return
    if decision.simulated and "simulated" not in _told:
        _told.add("simulated")
        warnings.warn(
            f"{decision.op}: backend {decision.backend!r} runs in a simulator of its device, which is slow; "
            "OPMUX_SIMULATE=never makes that an error",
            SimulatedBackendWarning,
            stacklevel=2,
        )
    selected = decision.candidate(decision.backend)
    passed_over = [
        candidate
        for candidate in decision.candidates
        if candidate.state == "failed" or (candidate.tier == "kernel" and candidate.reasons)
    ]
    if decision.forced or device.platform == "cpu" or selected.tier == "kernel" or not passed_over:
        return
    reasons = "; ".join(
        f"{candidate.backend}: " + ", ".join(f"{reason.code}: {reason.detail}" for reason in candidate.reasons)
        for candidate in passed_over
    )
    if (decision.op, reasons) not in _told:
        _told.add((decision.op, reasons))
        warnings.warn(
            f"{decision.op} runs on {device.name} by backend {decision.backend!r} ({selected.tier}), because {reasons}",
            SlowPathWarning,
            stacklevel=2,
        )


def nobody_to_disable(names: Iterable[str], known: Iterable[str]) -> None:
    """Warns about plugins that OPMUX_DISABLE names and nobody has: absent on this machine, or misspelt."""
    for name in sorted(set(names)):
        if ("disabled", name) not in _told:
            _told.add(("disabled", name))
            near = near_matches(name, known)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            warnings.warn(f"OPMUX_DISABLE: no plugin is named {name!r}{meant}", PluginWarning, stacklevel=2)


def forget() -> None:
    """Makes every notice new again, for tests."""
    _told.clear()

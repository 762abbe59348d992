"""The record of one choice: what was asked, what applied, and what became of every candidate."""

from __future__ import annotations

import itertools
import textwrap
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

State = Literal["selected", "viable", "rejected", "failed"]

_WIDTH = 80


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Reason(_Record):
    """One reason against a candidate: a stable code, the figures, and what could be done about it."""

    code: str
    detail: str
    hint: str = ""


class Candidate(_Record):
    """One backend that was considered.

    Attributes:
      backend: its name.
      state: `selected`, `viable` (could have run it), `rejected`, or `failed` (the plugin did not load).
      reasons: all reasons against it; empty if it is viable.
      tier: `kernel`, `interpret` or `reference`.
      priority: its priority on the device.
      simulated: it would run in a simulator of its device.
    """

    backend: str
    state: State
    reasons: tuple[Reason, ...] = ()
    tier: str = ""
    priority: int = 0
    simulated: bool = False


class Layer(_Record):
    """One source of preferences and what it says."""

    source: str
    text: str


class Decision(_Record):
    """Which implementation runs a request on a device, and why.

    Attributes:
      op: name of the op.
      request: operands and parameters, in canonical form.
      device: name of the device that was chosen for.
      platform: its JAX platform.
      layers: sources that say something about this op, in the order of precedence.
      forced_by: source that forces the backends, or empty.
      forced: the forced backends, in order.
      backend: the chosen backend; empty if there is none.
      reason: why that one, or why none.
      config: the chosen kernel's config.
      simulated: the kernel runs in a simulator of its device.
      candidates: every backend that was considered, best first.
      backward: the same record for the op's backward, which is chosen together with it; None where JAX
        differentiates the forward itself. Its backend is `reference` where no backend brings a kernel.
    """

    op: str
    request: str
    device: str
    platform: str
    layers: tuple[Layer, ...] = ()
    forced_by: str = ""
    forced: tuple[str, ...] = ()
    backend: str = ""
    reason: str = ""
    config: dict[str, Any] = {}
    simulated: bool = False
    candidates: tuple[Candidate, ...] = ()
    backward: Decision | None = None

    def candidate(self, backend: str) -> Candidate | None:
        """The record of one backend, if it was considered."""
        return next((found for found in self.candidates if found.backend == backend), None)

    def __str__(self) -> str:
        lines = _wrap("", self.request)
        for layer in self.layers:
            lines += _wrap("policy    ", f"{layer.source}: {layer.text}")
        lines += _wrap("device    ", f"{self.device} ({self.platform})")
        lines += _wrap("chosen    ", f"{self.backend or 'none'}: {self.reason}" + " (simulated)" * self.simulated)
        if self.config:
            lines += _wrap("config    ", " ".join(f"{name}={value}" for name, value in self.config.items()))
        if self.backward is not None:
            lines += _wrap("backward  ", f"{self.backward.backend}: {self.backward.reason}")
        width = max((len(found.backend) for found in self.candidates), default=0)
        numbers = itertools.count(1)
        for found in self.candidates:
            mark = f"{next(numbers):>3} " if found.state in ("selected", "viable") else "  - "
            head = f"{mark}{found.backend:<{width}}  {found.state:<8}  "
            if not found.reasons:
                lines.append(f"{head}{found.tier}, priority {found.priority}" + ", simulated" * found.simulated)
            for reason in found.reasons:
                lines += _wrap(head, f"{reason.code}: {reason.detail}")
                if reason.hint:
                    lines += _wrap(" " * len(head), f"hint: {reason.hint}")
                head = " " * len(head)
        return "\n".join(lines)


def _wrap(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * max(len(head), 4),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]

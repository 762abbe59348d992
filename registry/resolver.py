"""Chooses one implementation for a request on a device, and records why.

    forced by call > scope > environment > configure   ──►  first viable of the forced backends, or an error
    nobody forces                                      ──►  all viable backends, ranked

Every reason against every candidate is collected; nothing stops at the first. A choice that is forced asks, and
imports, the forced backends only, unless it fails or somebody wants an explanation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from opmux.core.devices import Device
from opmux.core.errors import ConfigError, ForcedBackendError, NoViableImplementationError, ResolutionError
from opmux.core.implementation import Rejection
from opmux.core.op import Op, backward_request
from opmux.core.request import Request
from opmux.registry import ranking, tables
from opmux.registry.candidates import Choice, Considered, Options, consider, turned_down_for
from opmux.registry.decision import Decision, Layer
from opmux.registry.environment import AUTO, Rule, Rules
from opmux.registry.loader import PluginFailure
from opmux.registry.policy import Policy

REFERENCE = "reference"


@dataclass(frozen=True)
class Plan:
    """The outcome for one device.

    Attributes:
      decision: the record.
      forward: what runs; None if no implementation could be chosen.
      backward: what runs for the derivative; None for autodiff, of the forward itself or of the op's reference.
      error: why there is no forward.
      backward_error: why there is no backward, where one is forced by name.
    """

    decision: Decision
    forward: Choice | None = None
    backward: Choice | None = None
    error: ResolutionError | ConfigError | None = None
    backward_error: ResolutionError | ConfigError | None = None

    @property
    def forward_mode(self) -> bool:
        """Whether JAX differentiates the forward kernel itself."""
        own = self.forward is not None and self.forward.implementation.forward_mode
        return own and self.backward is None and self.backward_error is None


@lru_cache(maxsize=4096)
def plan(
    op: Op,
    request: Request,
    device: Device,
    policy: Policy,
    options: Options,
    *,
    among: frozenset[str] | None = None,
    complete: bool = False,
) -> Plan:
    """Chooses forward and backward for a request on a device.

    A request that nothing can run raises nothing here: see `Plan.error`.

    Args:
      op: the op.
      request: the request.
      device: the kind of device.
      policy: the policy.
      options: what the call asks for.
      among: backends that may be chosen, where a choice has to hold for other devices as well.
      complete: record every backend, also those that a forced choice does not need to ask.

    Raises:
      PluginError: a plugin is broken, and OPMUX_STRICT_PLUGINS is set.
    """
    chosen = _choose(op, request, device, policy, options, among=among, others=True if complete else None)
    if chosen.forward is None:
        return chosen
    return _with_backward(op, request, device, policy, options, chosen, complete)


def _choose(
    op: Op,
    request: Request,
    device: Device,
    policy: Policy,
    options: Options,
    *,
    among: frozenset[str] | None = None,
    others: bool | None = None,
) -> Plan:
    """Chooses one implementation.

    `others` says whether a forced choice asks the other backends too, for the record; None if it fails.
    """
    source, rule = _speaks(op.name, device, policy, options)
    forced = rule.backends if rule is not None and rule.backends != (AUTO,) else ()

    def ask(names: list[str]) -> list[Considered]:
        asked = [consider(name, op.name, request, device, policy, options.config, forced) for name in names]
        return [_kept_out(found, among, device) for found in asked if found is not None]

    considered = ask(list(forced))
    viable = any(found.choice is not None for found in considered)
    if not forced or others or (others is None and not viable):
        # Failed plugins are shown, and disabled ones too.
        considered += ask([name for name in tables.loader.names() if name not in forced])
    if forced:
        order = considered
        eligible = [found for found in considered if found.choice is not None and found.name in forced]
        reason = f"forced by {source}"
    else:
        order, reason = ranking.ordered(considered, op.name, request, device, policy)
        eligible = [found for found in order if found.choice is not None]
    best = eligible[0] if eligible else None
    record: dict[str, Any] = {
        "op": op.name,
        "request": str(request),
        "device": device.name,
        "platform": device.platform,
        "layers": _layers(op.name, device, policy, options),
        "forced_by": source if forced else "",
        "forced": forced,
        "candidates": tuple(
            found.candidate.model_copy(update={"state": "selected"}) if found is best else found.candidate
            for found in order
        ),
    }
    if best is None or best.choice is None:
        decision = Decision(**record, reason=_why_none(forced, source, considered))
        return Plan(decision, error=_error(op, options, considered, decision))
    choice = best.choice
    decision = Decision(
        **record,
        backend=best.name,
        reason=reason,
        config=choice.config.model_dump(),
        simulated=bool(choice.simulator),
    )
    return Plan(decision, choice)


def _kept_out(found: Considered, among: frozenset[str] | None, device: Device) -> Considered:
    if among is None or found.name in among or found.choice is None:
        return found
    detail = f"it cannot run this request on every kind of {device.platform} device of this process"
    return turned_down_for(found, Rejection("capability", detail, "arrays outside of jit decide by their own device"))


def _sources(policy: Policy, options: Options) -> list[tuple[str, Rules]]:
    return [("call", options.rules), *((source, found.rules) for source, found in policy.layers())]


def _speaks(op: str, device: Device, policy: Policy, options: Options) -> tuple[str, Rule | None]:
    """The first source that has a rule for an op on a device, and that rule."""
    for source, rules in _sources(policy, options):
        rule = rules.lookup(op, device.platform)
        if rule is not None:
            return source, rule
    return "", None


def _layers(op: str, device: Device, policy: Policy, options: Options) -> tuple[Layer, ...]:
    """The sources that say something which bears on an op, in words."""
    said: list[tuple[str, str]] = []
    if (rule := options.rules.lookup(op, device.platform)) is not None:
        said.append(("call", f'backend="{rule}"'))
    said += [(source, found.text_for(op, device.platform)) for source, found in policy.layers()]
    return tuple(Layer(source=source, text=text) for source, text in said if text)


def _why_none(forced: tuple[str, ...], source: str, considered: list[Considered]) -> str:
    if forced:
        return f"{source} forces {', '.join(forced)}, which cannot run this request"
    return "no backend has this op" if not considered else "every backend rejected this request"


def _error(op: Op, options: Options, considered: list[Considered], decision: Decision) -> ResolutionError | ConfigError:
    asked = [found for found in considered if not decision.forced or found.name in decision.forced]
    wrong = [found for found in asked if found.config_problem]
    if options.config is not None and wrong:  # but for the config, these would run it
        problems = "; ".join(f"{found.name}: {found.config_problem}" for found in wrong)
        return ConfigError(f"config of {op.name!r}: {problems}")
    kind = ForcedBackendError if decision.forced else NoViableImplementationError
    error = kind(f"{op.name}: {decision.reason} on {decision.device}.", decision)
    for name in decision.forced:
        candidate = decision.candidate(name)
        plugin = tables.loader.load(name) if candidate is not None and candidate.state == "failed" else None
        if isinstance(plugin, PluginFailure):
            error.__cause__ = plugin.error.__cause__ or plugin.error
    return error


def _with_backward(
    op: Op, request: Request, device: Device, policy: Policy, options: Options, forward: Plan, complete: bool
) -> Plan:
    """Adds the backward to a chosen forward.

    The forward's own backend comes first. Another one is considered only where nothing forces the forward, or where
    a rule names the backward itself; then that rule is as strict as any.
    """
    assert forward.forward is not None
    own = forward.forward.implementation
    asked = backward_request(op, request)
    source, rule = _speaks(op.vjp.name, device, policy, options)
    named = rule is not None and rule.op == op.vjp.name
    automatic = rule is None or rule.backends == (AUTO,)
    if not asked.wanted or (own.forward_mode and (automatic or not named)):
        return forward
    options = Options(options.rules, None, options.device)

    if named and not automatic:
        found = _choose(op.vjp, asked, device, policy, options, others=True if complete else None)
        decision = forward.decision.model_copy(update={"backward": found.decision})
        return Plan(decision, forward.forward, found.forward, backward_error=found.error)

    forced = forward.decision.forced
    free = automatic and (named or not forced)
    twin = consider(own.backend, op.vjp.name, asked, device, policy, None, forced)
    chosen = twin.choice if twin is not None else None
    reason = f"{own.backend} has no backward kernel for this request; autodiff of the op's reference"
    found = None
    if complete or (chosen is None and free):
        found = _choose(op.vjp, asked, device, policy, options, others=complete)
    if chosen is not None:
        reason = "the backend of the forward"
    elif found is not None and found.forward is not None and free:
        chosen, reason = found.forward, found.decision.reason
    name = chosen.implementation.backend if chosen is not None else REFERENCE
    candidates = found.decision.candidates if found is not None else (twin.candidate,) if twin is not None else ()
    record = Decision(
        op=op.vjp.name,
        request=str(asked),
        device=device.name,
        platform=device.platform,
        layers=_layers(op.vjp.name, device, policy, options),
        forced_by=source if forced and not automatic else "",
        forced=forced if not automatic else (),
        backend=name,
        reason=reason,
        config=chosen.config.model_dump() if chosen is not None else {},
        simulated=chosen is not None and bool(chosen.simulator),
        candidates=tuple(
            candidate.model_copy(update={"state": "selected" if candidate.backend == name else "viable"})
            if candidate.state in ("selected", "viable")
            else candidate
            for candidate in candidates
        ),
    )
    return Plan(forward.decision.model_copy(update={"backward": record}), forward.forward, chosen)

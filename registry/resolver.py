"""Chooses one implementation for a request on a device, and records why.

    forced by call > scope > environment > configure   ──►  first viable of the forced backends, or an error
    nobody forces                                      ──►  all viable backends, ordered:
        prefer lists > opmux_rank > priority on this device > narrower priority entry > built-in first > name

Every reason against every candidate is collected; nothing stops at the first. An implementation is asked by its
`supports` predicate only: no kernel is imported, no device is touched, and no exception means "try the next one".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.errors import ConfigError, ForcedBackendError, NoViableImplementationError, ResolutionError
from opmux.core.implementation import Implementation, Rejection
from opmux.core.op import Op, backward_request
from opmux.core.request import Request
from opmux.registry import tables
from opmux.registry.decision import Candidate, Decision, Layer, Reason
from opmux.registry.environment import Rules
from opmux.registry.loader import Plugin, PluginFailure
from opmux.registry.policy import Policy

REFERENCE = "reference"


@dataclass(frozen=True)
class Options:
    """What one `get` asks for on top of the policy.

    Attributes:
      rules: backends that the call forces.
      config: config of the kernel: a `Config`, or items that override fields of the default one.
      device: the device to choose for.
    """

    rules: Rules = field(default_factory=Rules)
    config: Config | tuple[tuple[str, Any], ...] | None = None
    device: Device | None = None


@dataclass(frozen=True)
class Choice:
    """A chosen kernel: what runs, with what config, in what simulator."""

    implementation: Implementation
    config: Config
    simulator: str = ""


@dataclass(frozen=True)
class Plan:
    """The outcome for one device. `forward` is None if no implementation could be chosen; `error` says why."""

    decision: Decision
    forward: Choice | None = None
    backward: Choice | None = None
    error: ResolutionError | ConfigError | None = None


@dataclass
class _Considered:
    name: str
    candidate: Candidate
    choice: Choice | None = None
    config_problem: str = ""


@lru_cache(maxsize=4096)
def plan(op: Op, request: Request, device: Device, policy: Policy, options: Options) -> Plan:
    """Chooses forward and backward for a request on a device. Raises nothing: see `Plan.error`."""
    forward = _choose(op, request, device, policy, options)
    chosen = forward.forward
    if chosen is None or chosen.implementation.forward_mode or not op.differentiable:
        return forward
    backward, decision = _backward(op, request, device, policy, options, chosen, forward.decision)
    return Plan(forward.decision.model_copy(update={"backward": decision}), chosen, backward)


def _choose(op: Op, request: Request, device: Device, policy: Policy, options: Options) -> Plan:
    source, forced = _forced(op.name, device, policy, options)
    layers = tuple(Layer(source=name, text=text) for name, text in _speaking(op.name, device, policy, options))
    names = list(forced) if forced else []
    names += [name for name in _known(policy) if name not in forced]
    considered = [_consider(name, op.name, request, device, policy, options.config, forced) for name in names]
    considered = [found for found in considered if found is not None]
    record: dict[str, Any] = {
        "op": op.name, "request": str(request), "device": device.name, "platform": device.platform,
        "layers": layers, "forced_by": source, "forced": forced,
    }  # fmt: skip

    if forced:
        order = considered
        eligible = [found for found in considered if found.choice is not None and found.name in forced]
        reason = f"forced by {source}"
    else:
        order = _ordered(considered, op, request, device, policy)
        eligible = [found for found in order if found.choice is not None]
        reason = _why_first(eligible, policy)
    if eligible:
        best = eligible[0]
        choice = best.choice
        assert choice is not None
        candidates = tuple(
            found.candidate.model_copy(update={"state": "selected"}) if found is best else found.candidate
            for found in order
        )
        decision = Decision(
            **record,
            backend=best.name,
            reason=reason,
            config=choice.config.model_dump(),
            simulated=bool(choice.simulator),
            candidates=candidates,
        )
        return Plan(decision, choice)
    decision = Decision(
        **record, reason=_why_none(forced, source, considered), candidates=tuple(found.candidate for found in order)
    )
    return Plan(decision, error=_error(op, options, considered, decision))


def _forced(op: str, device: Device, policy: Policy, options: Options) -> tuple[str, tuple[str, ...]]:
    """The first source that forces backends for an op on a device, and those backends."""
    for source, rules in _sources(policy, options):
        rule = rules.lookup(op, device.platform)
        if rule is not None:
            return source, rule.backends
    return "", ()


def _sources(policy: Policy, options: Options) -> list[tuple[str, Rules]]:
    return [("call", options.rules), *((source, found.rules) for source, found in policy.layers())]


def _speaking(op: str, device: Device, policy: Policy, options: Options) -> list[tuple[str, str]]:
    """The sources that say anything which bears on an op, in words."""
    said: list[tuple[str, str]] = []
    if (rule := options.rules.lookup(op, device.platform)) is not None:
        said.append(("call", f'backend="{rule}"'))
    said += [(source, str(found)) for source, found in policy.layers() if str(found) != "none"]
    return said


def _known(policy: Policy) -> list[str]:
    """Every backend that automatic choice considers; failed plugins are shown, disabled ones too."""
    tables.loader.load_all(policy.disabled, strict=policy.strict)
    return tables.loader.names()


def _consider(
    name: str,
    op: str,
    request: Request,
    device: Device,
    policy: Policy,
    config: Config | tuple[tuple[str, Any], ...] | None,
    forced: tuple[str, ...],
) -> _Considered | None:
    """What one backend says to a request; None if it does not have the op and nobody asked for it."""
    if name in policy.disabled:
        return _rejected(name, Rejection("disabled", "the plugin is disabled", "take it out of OPMUX_DISABLE"))
    plugin = tables.plugin_of(name, strict=policy.strict)
    if isinstance(plugin, PluginFailure):
        return _rejected(name, Rejection("plugin-failed", plugin.reason, "see `opmux doctor`"), state="failed")
    implementation = plugin.implementation(op) if plugin is not None else None
    if plugin is None or plugin.contents.info is None or implementation is None:
        if name not in forced:
            return None
        have = ", ".join(found.op for found in plugin.contents.implementations) if plugin is not None else "nothing"
        return _rejected(name, Rejection("no-implementation", f"it has no {op!r}; it has {have}"))

    info = plugin.contents.info
    rejections: list[Rejection] = []
    simulator = ""
    if info.platforms and (device.platform not in info.platforms or policy.simulate == "always"):
        simulator, rejection = _away_from_home(name, plugin, device, policy, forced)
        rejections += [rejection] if rejection is not None else []
    rejections += implementation.supports(request, device)
    choice, problem = None, ""
    if not rejections:
        try:
            choice = Choice(implementation, _config(implementation, request, device, config), simulator)
        except (ValidationError, ConfigError) as error:
            problem = _explain_config(error)
            rejections.append(Rejection("config", problem, f"schema: {implementation.config.__name__}"))
    candidate = Candidate(
        backend=name,
        state="rejected" if rejections else "viable",
        reasons=tuple(Reason(code=r.code, detail=r.detail, hint=r.hint) for r in rejections),
        tier=info.tier,
        priority=implementation.priority_on(device),
        simulated=bool(simulator),
    )
    return _Considered(name, candidate, choice, problem)


def _rejected(name: str, rejection: Rejection, state: Any = "rejected") -> _Considered:
    reason = Reason(code=rejection.code, detail=rejection.detail, hint=rejection.hint)
    return _Considered(name, Candidate(backend=name, state=state, reasons=(reason,)))


def _away_from_home(
    name: str, plugin: Plugin, device: Device, policy: Policy, forced: tuple[str, ...]
) -> tuple[str, Rejection | None]:
    """Simulator for a backend whose device is absent, or the reason why it cannot run."""
    info = plugin.contents.info
    assert info is not None
    absent = f"runs on {', '.join(info.platforms)}, not on {device.platform}"
    if not info.simulator:
        return "", Rejection("platform", absent)
    if policy.simulate == "never":
        return "", Rejection("platform", f"{absent}, and OPMUX_SIMULATE=never", "OPMUX_SIMULATE=auto simulates it")
    if name not in forced:
        if device.platform in info.platforms:
            return "", None
        return "", Rejection("platform", absent, f"OPMUX_BACKEND={name} runs it in a simulator")
    return info.simulator, None


def _config(
    implementation: Implementation,
    request: Request,
    device: Device,
    given: Config | tuple[tuple[str, Any], ...] | None,
) -> Config:
    if given is None:
        return implementation.config_for(request, device)
    if isinstance(given, Config):
        if not isinstance(given, implementation.config):
            raise ConfigError(f"got a {type(given).__name__}; allowed: {implementation.config.__name__}")
        return given
    default = implementation.config_for(request, device).model_dump()
    return implementation.config.model_validate({**default, **dict(given)})


def _explain_config(error: ValidationError | ConfigError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    problems = [
        f"field {'.'.join(map(str, found['loc']))!r}: got {found['input']!r}: {found['msg']}"
        for found in error.errors(include_url=False)
    ]
    return "; ".join(problems)


def _ordered(
    considered: list[_Considered], op: Op, request: Request, device: Device, policy: Policy
) -> list[_Considered]:
    """Viable backends best first, then the others by name."""

    def rank(found: _Considered) -> tuple[Any, ...]:
        assert found.choice is not None
        implementation = found.choice.implementation
        preferred = policy.preferred
        return (
            preferred.index(found.name) if found.name in preferred else len(preferred),
            hooked.get(found.name, len(hooked)),
            -implementation.priority_on(device),
            -implementation.narrowness_on(device),
            not implementation.builtin,
            found.name,
        )

    viable = [found for found in considered if found.choice is not None]
    names = sorted(found.name for found in viable)
    hooked = {name: place for place, name in enumerate(_hooked_rank(op.name, request, names, policy))}
    others = [found for found in considered if found.choice is None]
    return sorted(viable, key=rank) + sorted(others, key=lambda found: found.name)


def _hooked_rank(op: str, request: Request, names: list[str], policy: Policy) -> list[str]:
    for plugin in tables.loader.load_all(policy.disabled, strict=policy.strict):
        if plugin.contents.rank is not None:
            opinion = plugin.contents.rank(op=op, request=request, candidates=tuple(names))
            if opinion is not None:
                return [name for name in opinion if name in names]
    return []


def _why_first(eligible: list[_Considered], policy: Policy) -> str:
    if not eligible:
        return ""
    if len(eligible) == 1:
        return "the only viable backend"
    best, second = eligible[0], eligible[1]
    if best.name in policy.preferred:
        return "preferred"
    first, other = best.candidate.priority, second.candidate.priority
    if first > other:
        return f"highest priority on this device, {first} against {other} of {second.name}"
    if first < other:
        return "ranked first by a plugin's opmux_rank hook"
    return f"ranked before {second.name} at an equal priority of {first}"


def _why_none(forced: tuple[str, ...], source: str, considered: list[_Considered]) -> str:
    if forced:
        return f"{source} forces {', '.join(forced)}, which cannot run this request"
    return "no backend has this op" if not considered else "every backend rejected this request"


def _error(
    op: Op, options: Options, considered: list[_Considered], decision: Decision
) -> ResolutionError | ConfigError:
    wrong = [found for found in considered if found.config_problem and found.name in (decision.forced or (found.name,))]
    others = [found for found in considered if found not in wrong and found.name in (decision.forced or (found.name,))]
    if (
        options.config is not None
        and wrong
        and all(len(found.candidate.reasons) == 1 for found in wrong)
        and (decision.forced or not others)
    ):
        problems = "; ".join(f"{found.name}: {found.config_problem}" for found in wrong)
        return ConfigError(f"config of {op.name!r}: {problems}")
    kind = ForcedBackendError if decision.forced else NoViableImplementationError
    return kind(f"{op.name}: {decision.reason} on {decision.device}.", decision)


def _backward(
    op: Op,
    request: Request,
    device: Device,
    policy: Policy,
    options: Options,
    forward: Choice,
    decision: Decision,
) -> tuple[Choice | None, Decision]:
    """The backward that goes with a chosen forward; no choice means autodiff of the op's reference.

    The forward's own backend comes first. Another backend is considered only where nothing forces the forward, or
    where a rule names the backward itself.
    """
    asked = backward_request(op, request)
    found = _choose(op.vjp, asked, device, policy, Options(options.rules, None, options.device))
    own = forward.implementation.backend
    explicit = any(rule.op == op.vjp.name for _, rules in _sources(policy, options) for rule in rules.rules)
    if explicit and found.forward is not None:
        return found.forward, found.decision
    twin = _consider(own, op.vjp.name, asked, device, policy, None, decision.forced)
    if twin is not None and twin.choice is not None:
        chosen, reason = twin.choice, "the backend of the forward"
    elif not decision.forced and found.forward is not None and found.decision.candidates:
        chosen, reason = found.forward, found.decision.reason
    else:
        chosen, reason = None, f"{own} has no backward kernel for this request; autodiff of the op's reference"
    name = chosen.implementation.backend if chosen is not None else REFERENCE
    candidates = tuple(
        candidate.model_copy(update={"state": "selected" if candidate.backend == name else "viable"})
        if candidate.state in ("selected", "viable")
        else candidate
        for candidate in found.decision.candidates
    )
    record = found.decision.model_copy(
        update={
            "backend": name,
            "reason": reason,
            "config": chosen.config.model_dump() if chosen is not None else {},
            "candidates": candidates,
        }
    )
    return chosen, record

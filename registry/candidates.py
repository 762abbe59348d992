"""What one backend says to a request: the kernel it would run, or every reason why it would not.

A backend is asked by its `supports` predicate only: no kernel is imported and no device is touched. A predicate that
raises is a broken plugin, which is kept as a reason; it does not end the choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from opmux.core.config import Config
from opmux.core.devices import Device
from opmux.core.errors import ConfigError, PluginError
from opmux.core.implementation import BackendInfo, Implementation, Rejection
from opmux.core.request import Request
from opmux.registry import tables
from opmux.registry.decision import Candidate, Reason
from opmux.registry.environment import Rules
from opmux.registry.loader import Plugin, PluginFailure
from opmux.registry.policy import Policy

GivenConfig = Config | tuple[tuple[str, Any, type], ...] | None


@dataclass(frozen=True)
class Options:
    """What one `get` asks for on top of the policy.

    Attributes:
      rules: backends that the call forces.
      config: config of the kernel: a `Config`, or fields that override those of the default one, each with its type.
      device: the device to choose for.
    """

    rules: Rules = field(default_factory=Rules)
    config: GivenConfig = None
    device: Device | None = None


@dataclass(frozen=True)
class Choice:
    """A chosen kernel: what runs, with what config, in what simulator.

    Attributes:
      request: the request that it was chosen for.
      device: the device that it was chosen for.
      given: what the caller gave as config.
    """

    implementation: Implementation
    config: Config
    simulator: str = ""
    request: Request | None = field(default=None, compare=False)
    device: Device | None = field(default=None, compare=False)
    given: GivenConfig = field(default=None, compare=False)

    def takes(self, request: Request) -> bool:
        """Whether the kernel also takes the request with its operands batched."""
        return self.device is not None and not _asked(self.implementation, request, self.device)

    def config_for(self, request: Request) -> Config:
        """The config for a request that differs from the one it was chosen for."""
        if self.device is None or self.request is None or request.operands == self.request.operands:
            return self.config
        return _config(self.implementation, request, self.device, self.given)


@dataclass(frozen=True)
class Considered:
    """One backend that was asked: its record, and what it would run if it is viable."""

    name: str
    candidate: Candidate
    choice: Choice | None = None
    config_problem: str = ""


def consider(
    name: str,
    op: str,
    request: Request,
    device: Device,
    policy: Policy,
    config: GivenConfig,
    forced: tuple[str, ...],
) -> Considered | None:
    """What one backend says to a request; None if it does not have the op and nobody asked for it.

    Raises:
      PluginError: the plugin is broken, and OPMUX_STRICT_PLUGINS is set.
    """
    if name in policy.disabled:
        return _turned_down(name, Rejection("disabled", "the plugin is disabled", "take it out of OPMUX_DISABLE"))
    plugin = tables.loader.load(name, strict=policy.strict)
    if isinstance(plugin, PluginFailure):
        return _turned_down(name, Rejection("plugin-failed", plugin.reason, "see `opmux doctor`"), state="failed")
    info = plugin.contents.info if plugin is not None else None
    implementation = plugin.implementation(op) if plugin is not None else None
    if plugin is None or info is None or implementation is None:
        return _turned_down(name, _lacks(name, plugin, op)) if name in forced else None

    rejections: list[Rejection] = []
    simulator = ""
    if info.platforms and (device.platform not in info.platforms or policy.simulate == "always"):
        simulator, rejection = _away_from_home(info, device, policy, forced)
        rejections += [rejection] if rejection is not None else []
    choice, problem, priority = None, "", 0
    try:
        priority = implementation.priority_on(device, request)
        rejections += _asked(implementation, request, device)
        if not rejections:
            fitted = _config(implementation, request, device, config)
            choice = Choice(implementation, fitted, simulator, request, device, config)
    except (ValidationError, ConfigError) as error:
        problem = _explain_config(error)
        rejections.append(Rejection("config", problem, f"schema: {implementation.config.__name__}"))
    except Exception as cause:
        what = f"its predicate, config or priority for {op!r} raised {type(cause).__name__}: {cause}"
        if policy.strict:
            raise PluginError(f"plugin {name!r}: {what}") from cause
        return _turned_down(name, Rejection("plugin-failed", what, "report it to its author"), state="failed")
    candidate = Candidate(
        backend=name,
        state="rejected" if rejections else "viable",
        reasons=tuple(map(_reason, rejections)),
        tier=info.tier,
        priority=priority,
        simulated=bool(simulator),
    )
    return Considered(name, candidate, choice, problem)


def turned_down_for(found: Considered, rejection: Rejection) -> Considered:
    """A backend with one more reason against it."""
    reasons = (*found.candidate.reasons, _reason(rejection))
    return Considered(found.name, found.candidate.model_copy(update={"state": "rejected", "reasons": reasons}))


def _turned_down(name: str, rejection: Rejection, state: Any = "rejected") -> Considered:
    return Considered(name, Candidate(backend=name, state=state, reasons=(_reason(rejection),)))


def _reason(rejection: Rejection) -> Reason:
    return Reason(code=rejection.code, detail=rejection.detail, hint=rejection.hint)


def _lacks(name: str, plugin: Plugin | None, op: str) -> Rejection:
    have = [found.op for found in plugin.contents.implementations] if plugin is not None else []
    hint = f'"{have[0]}={name}" forces it for that op alone' if have else ""
    return Rejection("no-implementation", f"it has no {op!r}; it has {', '.join(have) or 'nothing'}", hint)


def _asked(implementation: Implementation, request: Request, device: Device) -> list[Rejection]:
    answer: Any = implementation.supports(request, device)
    if not isinstance(answer, Iterable):
        raise TypeError(f"it gave a {type(answer).__name__}, not a list of Rejection")
    found: list[Any] = list(answer)
    if not all(isinstance(rejection, Rejection) for rejection in found):
        raise TypeError(f"it gave {found!r}, not a list of Rejection")
    return found


def _away_from_home(
    info: BackendInfo, device: Device, policy: Policy, forced: tuple[str, ...]
) -> tuple[str, Rejection | None]:
    """Simulator for a backend that is not to run on its own device, or the reason why it cannot run.

    Called where the device is another one, and for every backend of a device under `simulate="always"`.
    """
    at_home = device.platform in info.platforms
    simulates = bool(info.simulator) and policy.simulate != "never"
    if info.name in forced and simulates:
        return info.simulator, None
    if at_home:
        return "", None
    absent = f"runs on {', '.join(info.platforms)}, not on {device.platform}"
    if simulates:
        return "", Rejection("platform", absent, f"OPMUX_BACKEND={info.name} runs it in a simulator")
    if info.simulator:
        return "", Rejection("platform", f"{absent}, and OPMUX_SIMULATE=never", "OPMUX_SIMULATE=auto simulates it")
    return "", Rejection("platform", absent)


def _config(implementation: Implementation, request: Request, device: Device, given: GivenConfig) -> Config:
    schema = implementation.config
    if isinstance(given, Config):
        if not isinstance(given, schema):
            raise ConfigError(f"got a {type(given).__name__}; allowed: {schema.__name__}")
        return given
    default: Any = implementation.config_for(request, device)
    if not isinstance(default, schema):
        raise TypeError(f"default_config gave a {type(default).__name__}, not a {schema.__name__}")
    if given is None:
        return default
    return schema.model_validate({**default.model_dump(), **{name: value for name, value, _ in given}})


def _explain_config(error: ValidationError | ConfigError) -> str:
    if isinstance(error, ConfigError):
        return str(error)
    problems = [
        f"field {'.'.join(map(str, found['loc']))!r}: got {found['input']!r}: {found['msg']}"
        for found in error.errors(include_url=False)
    ]
    return "; ".join(problems)

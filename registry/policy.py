"""What the user prefers: scopes, the environment and process-wide settings, as one hashable value.

The truth about scopes is a `ContextVar`, which threads and async tasks each have their own of. JAX's caches know
nothing of it, so the policy is also the value of a JAX user context, which is part of the key of every jitted
function: entering a scope re-keys functions that users jitted themselves.

    scope (ContextVar) ─┐
    environment ────────┼─► Policy ─► JAX user context ─► key of every jit cache
    configure ──────────┘

A policy is interned: equal policies are one object, so comparing two of them is comparing identities, and coming
back to an earlier policy finds what was compiled under it. The first policy of a process stands for the user
context's default, `None`, so that opmux re-keys nothing until somebody asks for something else.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from opmux.core import compat
from opmux.core.compat import JaxDevice
from opmux.core.devices import Device
from opmux.core.errors import SettingError
from opmux.core.simulation import SimulatorOptions
from opmux.registry import environment, notices, tables
from opmux.registry.environment import Simulate
from opmux.registry.settings import NOTHING, Backend, Settings, device_of


@dataclass(frozen=True, eq=False)
class Policy:
    """Everything that a choice depends on besides the request, the device and the call. Interned.

    Attributes:
      scopes: settings of the active `use` scopes, innermost first.
      environment: settings of the environment variables.
      configured: settings of `configure`.
      strict: a plugin that fails to load raises.
      epoch: counts registrations and removals of plugins in this process.
    """

    scopes: tuple[Settings, ...]
    environment: Settings
    configured: Settings
    strict: bool
    epoch: int

    def layers(self) -> list[tuple[str, Settings]]:
        """The sources in the order of precedence."""
        scopes = [("scope", scope) for scope in self.scopes]
        return [*scopes, ("environment", self.environment), ("configure", self.configured)]

    @cached_property
    def simulate(self) -> Simulate:
        """The simulation policy of the first source that has one."""
        for _, found in self.layers():
            if found.simulate is not None:
                return found.simulate
        return "auto"

    @cached_property
    def simulator(self) -> SimulatorOptions:
        """The simulator options of the first source that has them."""
        for _, found in self.layers():
            if found.simulator is not None:
                return found.simulator
        return SimulatorOptions()

    @cached_property
    def device(self) -> Device | None:
        """The device to choose for, if a source names one."""
        return next((found.device for _, found in self.layers() if found.device is not None), None)

    @cached_property
    def disabled(self) -> frozenset[str]:
        """Plugins that any source disables."""
        return frozenset().union(*(found.disable for _, found in self.layers()))

    @cached_property
    def preferred(self) -> tuple[str, ...]:
        """Backends to rank first: the lists of all sources, one after another."""
        return tuple(dict.fromkeys(name for _, found in self.layers() for name in found.prefer))

    @cached_property
    def traced(self) -> Policy:
        """The policy that simulated kernels are traced under, one for all that differ in nothing they depend on."""
        scopes = tuple(scope.traced for scope in self.scopes)
        key = (scopes, self.environment, self.configured.traced, self.strict, self.epoch)
        return _process.interned.setdefault(key, Policy(*key))


class _Process:
    """The part of the policy that all threads share."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.raw: object = ()
        self.environment = NOTHING
        self.configured = NOTHING
        self.strict = False
        self.epoch = 0
        self.interned: dict[tuple[object, ...], Policy] = {}
        self.ambient: Policy = self.policy(())
        self.base: Policy | None = self.ambient
        self.used = False

    def policy(self, scopes: tuple[Settings, ...]) -> Policy:
        key = (scopes, self.environment, self.configured, self.strict, self.epoch)
        return self.interned.get(key) or self.interned.setdefault(key, Policy(*key))

    def publish(self) -> None:
        """Makes the settings of this process the ambient policy, and tells JAX's caches."""
        if not compat.trace_is_clean():
            # A trace under way has the old policy in its key, but what is chosen from here on follows the new one:
            # that key must never come back.
            self.epoch += 1
        self.ambient = self.policy(())
        self.base = self.base if self.used else self.ambient
        _context.set_global(key(self.ambient))


_context = jax.make_user_context(None)
_scopes: ContextVar[tuple[Settings, ...]] = ContextVar("opmux_scopes", default=())
_process = _Process()


def current() -> Policy:
    """The policy of the running thread or task.

    Raises:
      SettingError, UnknownNameError: an environment variable has a value that it cannot have.
    """
    if environment.raw() != _process.raw:
        _read_environment()
    return follow(_scopes.get())


def follow(scopes: tuple[Settings, ...]) -> Policy:
    """The policy under these scopes; if JAX's caches are keyed by them already, they follow it from here on.

    The environment and `configure` can change while a thread is inside of a scope, which JAX then holds an older
    policy for.
    """
    if not scopes:
        return _process.ambient
    policy, held = _process.policy(scopes), _context.value
    if held is not policy and held is not None and held.scopes == scopes:
        _context(policy).__enter__()  # for good: leaving the scope puts back what was there before it
    return policy


def key(policy: Policy) -> Policy | None:
    """The value of JAX's user context under a policy."""
    return None if policy is _process.base else policy


def active() -> Policy:
    """The policy in the key of the trace under way; using it fixes what `None` stands for."""
    _process.used = True
    return _context.value or _process.base or _process.ambient


def active_key() -> Policy | None:
    """The value of JAX's user context in this thread."""
    return _context.value


def entered(policy: Policy) -> Any:
    """A context in which JAX's caches are keyed by a policy."""
    _root.note()
    return _context(key(policy))


class _Root(threading.local):
    """For each thread, JAX's user context as it is outside of every scope: not set, so it follows the global value."""

    def __init__(self) -> None:
        self.context = _context(None)
        with self.context:
            pass

    def note(self) -> None:
        """Called before the thread enters anything, which the first access to this object then precedes."""

    def restore(self) -> None:
        """Puts that state back."""
        # Leaving once more what was entered first puts back what was there before it.
        self.context.__exit__(None, None, None)


_root = _Root()


def entered_for_good(scopes: tuple[Settings, ...]) -> None:
    """Makes JAX's caches follow these scopes of the running thread, whatever was entered and not left before."""
    _root.restore()
    if scopes:
        entered(_process.policy(scopes)).__enter__()


def scopes() -> ContextVar[tuple[Settings, ...]]:
    """The active scopes of the running thread or task, innermost first."""
    return _scopes


def _read_environment() -> None:
    with _process.lock:
        raw = environment.raw()
        texts = environment.read()
        disable = environment.parse_disable(texts.get(environment.DISABLE, ""))
        simulate = texts.get(environment.SIMULATE)
        settings = Settings(
            rules=environment.parse_rules(texts.get(environment.BACKEND, "")),
            simulate=None if simulate is None else environment.parse_simulate(simulate),
            disable=disable,
        )
        strict = environment.parse_flag(texts.get(environment.STRICT, ""), environment.STRICT)
        tables.check(settings.rules, environment.BACKEND, disable | _process.configured.disable)
        _process.environment, _process.strict = settings, strict
        _process.publish()
        # After what may raise: a text that does not parse raises again at the next call.
        _process.raw = raw
        if disable:
            known = tables.loader.names()
            notices.nobody_to_disable(disable.difference(known), known)


def configure(
    *,
    backend: Backend = None,
    prefer: tuple[str, ...] | list[str] | None = None,
    device: str | Device | JaxDevice | None = None,
    simulate: str | None = None,
    simulator: SimulatorOptions | None = None,
    disable: tuple[str, ...] | list[str] | None = None,
) -> None:
    """Sets process-wide preferences, which scopes, calls and the environment override.

    What is not given stays as it is.

    Args:
      backend: backends to force, as `OPMUX_BACKEND` spells them or a mapping of op to name; "auto" forces none.
      prefer: backends that automatic choice ranks first, in order; () for none.
      device: the device to choose for; "" for the one that arguments live on.
      simulate: `auto`, `never` or `always`.
      simulator: options of the simulators.
      disable: plugins that are never used; () for none.

    Raises:
      SettingError, UnknownNameError: a value is not one of those.
    """
    with _process.lock:
        current()
        asked = settings("configure", backend, prefer, device, simulate, simulator, disable)
        given = {
            "rules": backend, "prefer": prefer, "device": device, "simulate": simulate, "simulator": simulator,
            "disable": disable,
        }  # fmt: skip
        changes: dict[str, Any] = {name: getattr(asked, name) for name, value in given.items() if value is not None}
        _process.configured = replace(_process.configured, **changes)
        _process.publish()


def settings(
    where: str,
    backend: Backend = None,
    prefer: tuple[str, ...] | list[str] | None = None,
    device: str | Device | JaxDevice | None = None,
    simulate: str | None = None,
    simulator: SimulatorOptions | None = None,
    disable: tuple[str, ...] | list[str] | None = None,
) -> Settings:
    """Checked settings from what a user wrote."""
    for name, value in (("prefer", prefer), ("disable", disable)):
        if isinstance(value, str):
            raise SettingError(f"{where}: {name}: got the string {value!r}; allowed: a sequence of backend names")
    if simulator is not None and not isinstance(simulator, SimulatorOptions):
        raise SettingError(f"{where}: simulator: got a {type(simulator).__name__}; allowed: SimulatorOptions")
    disabled = current().disabled
    return Settings(
        rules=tables.check(environment.rules_from(backend, f"{where}(backend=...)"), where, disabled),
        prefer=tuple(tables.backend(name, f"{where}(prefer=...)", disabled) for name in prefer or ()),
        device=device_of(device),
        simulate=None if simulate is None else environment.parse_simulate(simulate, f"{where}(simulate=...)"),
        simulator=simulator,
        disable=frozenset(tables.backend(name, f"{where}(disable=...)", disabled) for name in disable or ()),
    )


def plugins_changed() -> None:
    """Re-keys JAX's caches after a plugin was registered or removed."""
    with _process.lock:
        _process.epoch += 1
        _process.publish()

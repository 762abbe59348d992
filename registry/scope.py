"""`use`: preferences for a block of code."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from opmux.core.compat import JaxDevice
from opmux.core.devices import Device
from opmux.core.errors import OverrideScopeError, SettingError
from opmux.core.simulation import SimulatorOptions
from opmux.registry import policy
from opmux.registry.policy import Backend, Settings

P = ParamSpec("P")
R = TypeVar("R")


class use:
    """Preferences for the calls made inside a `with` block, by this thread or task.

    They override the environment and `configure`, and an inner scope overrides an outer one. Functions that were
    jitted by the user are traced again inside a scope that they were not traced in before.

    A scope must not be held across an `await` while other tasks of the thread enter scopes of their own: JAX's
    caches are keyed by thread. That is detected and raises `OverrideScopeError`; `carry` hands a scope to a thread
    pool or task instead.

    Args:
      backend: backends to force, as `OPMUX_BACKEND` spells them, or a mapping of op to name.
      prefer: backends that automatic choice ranks first, in order.
      device: the device to choose for: a name (`h200`, `tpu-v6e`), a `jax.Device`, or `Device` facts.
      simulate: `auto`, `never` or `always`.
      simulator: options of the simulators, such as `SimulatorOptions(dma="eager")`.

    Raises:
      SettingError, UnknownNameError: a value is not one of those.
    """

    def __init__(
        self,
        *,
        backend: Backend = None,
        prefer: tuple[str, ...] | list[str] | None = None,
        device: str | Device | JaxDevice | None = None,
        simulate: str | None = None,
        simulator: SimulatorOptions | None = None,
    ) -> None:
        self._settings = policy.settings("use", backend, prefer, device, simulate, simulator)

    def __enter__(self) -> None:
        outer = policy.scopes().get()
        # A scope that asks for nothing new enters nothing: each new policy costs a trace of everything.
        repeats = self._settings == policy.NOTHING or (outer and outer[0] == self._settings)
        _enter(self, outer if repeats else (self._settings, *outer))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave(self)


@dataclass(frozen=True)
class _Entry:
    """What was entered, by whom, and what to go back to."""

    owner: object
    scopes: tuple[Settings, ...]
    outer: tuple[Settings, ...]
    mine: policy.Policy
    context: Any


# Each thread and task has its own, so one `use` object can be shared between them, and entered twice.
_entries: ContextVar[tuple[_Entry, ...]] = ContextVar("opmux_entries", default=())


def _enter(owner: object, scopes: tuple[Settings, ...]) -> None:
    outer = policy.scopes().get()
    policy.scopes().set(scopes)
    try:
        mine = policy.current()
        context = policy.entered(mine)
        context.__enter__()
    except BaseException:
        policy.scopes().set(outer)
        raise
    _entries.set((*_entries.get(), _Entry(owner, scopes, outer, mine, context)))


def _leave(owner: object) -> None:
    entries = _entries.get()
    place = max((place for place, entry in enumerate(entries) if entry.owner is owner), default=None)
    if place is None:  # left in another task than it was entered in
        policy.entered_for_good(policy.scopes().get())
        raise _out_of_order()
    entry = entries[place]
    found = policy.active_key()
    in_order = (
        entry is entries[-1]
        and policy.scopes().get() is entry.scopes
        and (found is policy.key(entry.mine) or _same_scopes(found, entry.scopes))
    )
    _entries.set(entries[:place])
    policy.scopes().set(entry.outer)
    entry.context.__exit__(None, None, None)
    policy.follow(entry.outer)
    if not in_order:
        # What JAX's context held on entry was another task's; this task's own outer scopes are the truth.
        policy.entered_for_good(entry.outer)
        raise _out_of_order()


def _out_of_order() -> OverrideScopeError:
    return OverrideScopeError(
        "scopes of registry.use were left in another order than they were entered: an `await` or `yield` inside a "
        "`with registry.use(...)` block let another task or function of this thread enter its own. Keep the block "
        "free of them, or wrap the function that runs in between with registry.carry."
    )


def _same_scopes(found: policy.Policy | None, scopes: tuple[Settings, ...]) -> bool:
    return (found.scopes if found is not None else ()) == scopes


def carry(function: Callable[P, R]) -> Callable[P, R]:
    """The function, running under the scopes that are active now, in whatever thread or task calls it.

    New threads start without scopes, and a thread that was given a copy of this context has them only in part:
    JAX keeps its own. Wrap what is submitted to a pool: `pool.submit(registry.carry(step), batch)`.

    Raises:
      SettingError: it is an `async` function, whose body runs after the scopes were left again. Carry the plain
        functions that it calls.
    """
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise SettingError(
            f"carry: got {function!r}, whose body runs after the call; allowed: a plain function. "
            "Carry the functions that it calls."
        )
    scopes = policy.scopes().get()

    @functools.wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        owner = object()
        _enter(owner, scopes)
        try:
            return function(*args, **kwargs)
        finally:
            _leave(owner)

    return carried

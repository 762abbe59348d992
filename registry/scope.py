"""`use`: preferences for a block of code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import Token
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from opmux.core.compat import JaxDevice
from opmux.core.devices import Device
from opmux.core.errors import OverrideScopeError
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
    ) -> None:
        self._settings = policy.settings("use", backend, prefer, device, simulate)
        self._entered: list[tuple[tuple[Settings, ...], Token[tuple[Settings, ...]], Any, policy.Policy]] = []

    def __enter__(self) -> None:
        outer = policy.scopes().get()
        # A scope that asks for nothing new enters nothing: each new policy costs a trace of everything.
        repeats = self._settings == policy.NOTHING or (outer and outer[0] == self._settings)
        scopes = outer if repeats else (self._settings, *outer)
        _enter(self._entered, scopes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave(self._entered)


def _enter(entered: list[Any], scopes: tuple[Settings, ...]) -> None:
    token = policy.scopes().set(scopes)
    try:
        mine = policy.current()
        context = policy.entered(mine)
        context.__enter__()
    except BaseException:
        policy.scopes().reset(token)
        raise
    entered.append((scopes, token, context, mine))


def _leave(entered: list[Any]) -> None:
    scopes, token, context, mine = entered.pop()
    found = policy.active_key()
    in_order = policy.scopes().get() is scopes and (found is policy.key(mine) or _same_scopes(found, scopes))
    try:
        policy.scopes().reset(token)
    except ValueError:  # left in another task than it was entered in
        in_order = False
    context.__exit__(None, None, None)
    if not in_order:
        # What the JAX context held on entry was another task's; this task's own outer scopes are the truth.
        policy.entered(policy.current()).__enter__()
        raise OverrideScopeError(
            "scopes of registry.use were left in another order than they were entered: an `await` inside a `with "
            "registry.use(...)` block let another task of this thread enter its own. Keep the block free of `await`, "
            "or wrap the function that runs in between with registry.carry."
        )


def _same_scopes(found: policy.Policy | None, scopes: tuple[Settings, ...]) -> bool:
    return (found.scopes if found is not None else ()) == scopes


def carry(function: Callable[P, R]) -> Callable[P, R]:
    """The function, running under the scopes that are active now, in whatever thread or task calls it.

    New threads start without scopes, and a thread that was given a copy of this context has them only in part:
    JAX keeps its own. Wrap what is submitted to a pool: `pool.submit(registry.carry(step), batch)`.
    """
    scopes = policy.scopes().get()

    @functools.wraps(function)
    def carried(*args: P.args, **kwargs: P.kwargs) -> R:
        entered: list[Any] = []
        _enter(entered, scopes)
        try:
            return function(*args, **kwargs)
        finally:
            _leave(entered)

    return carried

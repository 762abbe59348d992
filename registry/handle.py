"""What `registry.get` returns: a late-bound op.

A handle never holds a chosen kernel. Its body runs under one `jax.jit`, so JAX's C++ cache is the dispatch cache,
keyed by shapes, dtypes, static arguments, shardings and, through a user context, the policy. A warm call is a few
comparisons on top of that jitted function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NoReturn

import jax
import numpy as np

from opmux.core import compat
from opmux.core.devices import Device
from opmux.core.errors import ArgumentTypeError, MixedDeviceError, OpmuxError, OverrideScopeError
from opmux.core.op import Op
from opmux.registry import dispatch, placement, policy, resolver, tables
from opmux.registry.candidates import Options
from opmux.registry.decision import Decision
from opmux.registry.resolver import Plan

Statics = tuple[tuple[str, Any, type], ...]


class OpHandle:
    """An op, ready to be called like the function that its signature shows.

    The implementation is chosen when the handle is traced: by the device that the arguments live on, the scope, the
    environment and the process-wide settings of that moment. Make handles with `registry.get`.
    """

    def __init__(self, name: str, options: Options) -> None:
        self._name = name
        self._options = options
        op = self.op
        self.__name__ = name
        self.__doc__ = op.canonicalize.__doc__
        self._jitted = self._jit(options.device)
        self._elsewhere: dict[Device, _Jitted] = {}
        # Calls with this many positional arguments and no keyword need no binding: arrays only, nothing to check.
        self._plain = _plain_positionals(op)

    @property
    def op(self) -> Op:
        """The op behind the handle."""
        return tables.op(self._name, disabled=policy.current().disabled)

    @property
    def __signature__(self) -> inspect.Signature:
        return self.op.signature

    def __repr__(self) -> str:
        return f"<opmux op {self._name}{self.op.signature}>"

    def __reduce__(self) -> tuple[Any, ...]:
        """A handle is what was asked for: it copies and pickles as that, and is compiled anew where it arrives."""
        return OpHandle, (self._name, self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the op; see its signature."""
        wanted = policy.current()
        if kwargs or len(args) > self._plain:
            return self._call_bound(wanted, args, kwargs)
        told = self._options.device or wanted.device
        jitted = self._jitted if told is None and not placement.several() else self._jitted_for(told, args)
        try:
            if policy.key(wanted) is policy.active_key():
                return jitted.positional(*args)
            with _entered(wanted, args):
                return jitted.positional(*args)
        except (OverflowError, TypeError, ValueError) as error:
            self._blame_arguments(error, args, kwargs)

    def _call_bound(self, wanted: policy.Policy, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        arrays, statics = self._split(args, kwargs)
        jitted = self._jitted_for(self._options.device or wanted.device, arrays.values())
        try:
            with _entered(wanted, arrays.values()):
                return jitted.bound(arrays, statics)
        except (OverflowError, TypeError, ValueError) as error:
            self._blame_arguments(error, args, kwargs)

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """Which implementation these arguments would get, and why; runs nothing.

        Arguments may be arrays or `jax.ShapeDtypeStruct`s.

        Raises:
          ArgumentError: the op does not take these arguments.
        """
        wanted = policy.current()
        if not compat.trace_is_clean():
            wanted = policy.active()  # what the caller makes of the answer is part of the trace
        op = self.op
        arrays, statics = self._split(args, kwargs)
        request = op.request((), {**arrays, **{name: value for name, value, _ in statics}})
        device = self._options.device or wanted.device
        if device is None:
            concrete = [leaf for leaf in arrays.values() if isinstance(leaf, jax.Array) and not compat.is_traced(leaf)]
            device = placement.of_arrays(self._name, concrete)
        return resolver.plan(op, request, device, wanted, self._options, complete=True).decision

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The lowered computation (`jax.stages.Lowered`) of a call, for the chosen device's platform.

        Arguments may be `jax.ShapeDtypeStruct`s.
        """
        wanted = policy.current()
        arrays, statics = self._split(args, kwargs)
        device = self._options.device or wanted.device
        with _entered(wanted, ()):
            traced = self._jitted.bound.trace(arrays, statics)
            return traced.lower() if device is None else traced.lower(lowering_platforms=(device.platform,))

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Statics]:
        """Arrays and static values of a call by name, after the checks that only concrete values allow."""
        op = self.op
        arguments = op.bind(args, kwargs).arguments
        if op.prepare is not None:
            arguments = op.prepare(dict(arguments))
        arrays = {
            name: value
            for name, value in arguments.items()
            if value is not None and name not in op.static and not isinstance(value, tuple)
        }
        if op.check_values is not None:
            values = {
                name: np.asarray(arrays[name])
                for name in op.value_checked
                if name in arrays
                and isinstance(arrays[name], jax.Array | np.ndarray)
                and not compat.is_traced(arrays[name])
            }
            if values:
                op.check_values(values, {name: tuple(np.shape(value)) for name, value in arrays.items()})
        rest = {name: value for name, value in arguments.items() if name not in arrays and value is not None}
        statics = tuple((name, value, type(value)) for name, value in rest.items())
        try:
            hash(statics)
        except TypeError:
            op.request((), {**arrays, **rest})  # says which value it is, if the op does not take it at all
            for name, value in rest.items():
                if not isinstance(value, str | bytes) and not _hashable(value):
                    raise ArgumentTypeError(
                        self._name, name, f"a {type(value).__name__}", "a value that can be hashed", "Use a tuple."
                    ) from None
        return arrays, statics

    def _jitted_for(self, told: Device | None, leaves: Collection[Any]) -> _Jitted:
        """The jitted body to use: one for each kind of device that concrete arguments may live on."""
        if told is None and not placement.several():
            return self._jitted
        if not compat.trace_is_clean() or any(map(compat.is_traced, leaves)):
            return self._jitted
        device = placement.of_arrays(self._name, leaves)
        if told is not None:
            _refuse_elsewhere(self._name, told, device)
            return self._jitted
        if device not in self._elsewhere:
            self._elsewhere[device] = self._jit(device)
        return self._elsewhere[device]

    def _jit(self, device: Device | None) -> _Jitted:
        return _Jitted(self._name, lambda args, kwargs: _run(self._name, self._options, device, args, kwargs))

    def _blame_arguments(self, error: Exception, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> NoReturn:
        """Raises an `ArgumentError` if the arguments are at fault, else the error itself."""
        if not isinstance(error, OpmuxError):
            self.op.check_arrays(self.op.bind(args, kwargs).arguments)
        raise error


class _Jitted:
    """The body of a handle under `jax.jit`, for calls of positional arrays and for calls by name."""

    def __init__(self, name: str, run: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
        def positional(*args: Any) -> Any:
            return run(args, {})

        def bound(arrays: dict[str, Any], statics: Statics) -> Any:
            return run((), {**arrays, **{name: value for name, value, _ in statics}})

        positional.__name__ = bound.__name__ = f"opmux_{name}"
        self.positional = jax.jit(positional, inline=True)
        self.bound = jax.jit(bound, static_argnums=1, inline=True)


def _run(name: str, options: Options, device: Device | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The body of a handle: canonicalize, choose, compute, hand back. Runs while JAX traces."""
    wanted = policy.active()
    op = tables.op(name, disabled=wanted.disabled)
    call = op.call(args, kwargs)
    told = device or options.device or wanted.device
    if told is not None:
        devices: tuple[Device, ...] = (told,)
    elif compat.trace_is_clean():  # jax.disable_jit: the operands are concrete
        devices = (placement.of_arrays(name, call.operands.values()),)
    else:
        devices = placement.of_trace()

    def plan(device: Device, among: frozenset[str] | None = None) -> Plan:
        return resolver.plan(op, call.request, device, wanted, options, among=among)

    plans = dispatch.plans_of(devices, plan)
    outputs = dispatch.execute(op, call.request, call.operands, plans, wanted, staged=len(devices) > 1)
    return call.finish(outputs)


def _entered(wanted: policy.Policy, leaves: Any) -> Any:
    """A context in which JAX's caches are keyed by the wanted policy.

    Raises:
      OverrideScopeError: a function under trace is keyed by other scopes than the running code is in.
    """
    active = policy.active_key()
    if (active.scopes if active is not None else ()) != wanted.scopes and (
        not compat.trace_is_clean() or any(map(compat.is_traced, leaves))
    ):
        raise OverrideScopeError(
            "a function is being traced in a thread or task whose registry.use scopes JAX does not know of, so its "
            "compiled form would be reused under other scopes. Wrap what is handed to the thread or task with "
            "registry.carry."
        )
    return policy.entered(wanted)


def _refuse_elsewhere(name: str, told: Device, found: Device) -> None:
    if found.platform != told.platform:
        raise MixedDeviceError(
            f"{name}: device={told.name!r} ({told.platform}) was asked for, but the arguments live on {found.name} "
            f"({found.platform}). To compile for a device that is not there, lower instead: "
            f'jax.jit(f).trace(...).lower(lowering_platforms=("{told.platform}",)), or handle.lower(...).'
        )


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _plain_positionals(op: Op) -> int:
    """How many leading parameters are arrays that need neither preparation nor a look at their values."""
    count = 0
    if op.prepare is not None:
        return count
    for name, parameter in op.signature.parameters.items():
        special = name in op.static or name in op.value_checked
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or special:
            break
        count += 1
    return count

"""Every error and warning opmux raises.

One family, so `except OpmuxError` catches all of it. Nothing here derives from
`NotImplementedError` or `ImportError`: callers use those as a signal to fall back on something else,
and an opmux error must not vanish that way. Errors about what a caller wrote are `ValueError`s too.

All of them pickle: an error keeps its constructor arguments in `args`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class OpmuxError(Exception):
    """Base class of every opmux error."""


class ArgumentError(OpmuxError, ValueError):
    """An argument of an op has a value, shape or dtype that the op does not take."""

    def __init__(self, op: str, argument: str, given: str, allowed: str, hint: str = "") -> None:
        super().__init__(op, argument, given, allowed, hint)
        self.op = op
        self.argument = argument
        self.given = given
        self.allowed = allowed
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.op}: argument {self.argument!r}: got {self.given}; allowed: {self.allowed}."
        return f"{text} {self.hint}" if self.hint else text


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument of an op is missing, unknown, or of a type that the op does not take."""


class UnknownNameError(OpmuxError, ValueError):
    """A name that nothing answers to. Says what is near, what exists, and what failed to load."""

    noun = "name"

    def __init__(self, name: str, known: Iterable[str], where: str = "", note: str = "") -> None:
        self.name = name
        self.known = tuple(sorted(known))
        self.where = where
        self.note = note
        super().__init__(name, self.known, where, note)

    def __str__(self) -> str:
        text = f"unknown {self.noun} {self.name!r}"
        if self.where:
            text += f" in {self.where}"
        near = near_matches(self.name, self.known)
        if near:
            text += f"; did you mean {' or '.join(map(repr, near))}?"
        else:
            text += "."
        text += f" Known: {', '.join(self.known) or 'none'}."
        return f"{text} {self.note}" if self.note else text


class UnknownOpError(UnknownNameError):
    """No op has this name."""

    noun = "op"


class UnknownBackendError(UnknownNameError):
    """No backend has this name."""

    noun = "backend"


class UnknownDeviceError(UnknownNameError):
    """No device is declared under this name."""

    noun = "device"


class SettingError(OpmuxError, ValueError):
    """A setting (environment variable, `use`, `configure`) has a value it cannot have."""


class EnvSyntaxError(SettingError):
    """The text of an environment variable does not parse. Shows the column."""

    def __init__(self, variable: str, text: str, column: int, problem: str) -> None:
        super().__init__(variable, text, column, problem)
        self.variable = variable
        self.text = text
        self.column = column
        self.problem = problem

    def __str__(self) -> str:
        pointer = " " * (self.column - 1) + "^"
        return (
            f"{self.variable}: column {self.column}: {self.problem}\n"
            f"  {self.text}\n"
            f"  {pointer}\n"
            "The grammar is entries separated by ';', each [OP][@PLATFORM]=BACKEND[,BACKEND...] "
            "or one BACKEND for every op; '*' stands for every op."
        )


class ConfigError(OpmuxError, ValueError):
    """A kernel config does not fit the schema of the implementation that should use it."""


class PluginError(OpmuxError):
    """A plugin could not be used."""


class PluginLoadError(PluginError):
    """A plugin could not be imported; the original exception is the cause."""


class PluginValidationError(PluginError):
    """A plugin was imported, but what it registers is malformed."""


class PluginConflictError(PluginError):
    """Two plugins claim the same name."""


class ResolutionError(OpmuxError):
    """No implementation could be chosen. `.decision` holds every candidate with its reasons."""

    def __init__(self, message: str, decision: Any = None) -> None:
        super().__init__(message, decision)
        self.message = message
        self.decision = decision

    def __str__(self) -> str:
        return self.message if self.decision is None else f"{self.message}\n\n{self.decision}"


class NoViableImplementationError(ResolutionError):
    """Every implementation of the op rejected this request."""


class ForcedBackendError(ResolutionError):
    """A forced backend cannot run this request; a forced backend never falls back."""


class MixedDeviceError(ResolutionError):
    """The arguments of one call live on devices of different platforms."""


class DifferentiationError(OpmuxError, TypeError):
    """A derivative was asked for that the chosen implementation has no rule for."""


class SimulationError(OpmuxError):
    """A kernel failed in the simulator of its device: a race, a read out of bounds, an error of its own."""

    def __init__(self, kernel: str, words: str) -> None:
        super().__init__(kernel, words)
        self.kernel = kernel
        self.words = words

    def __str__(self) -> str:
        return f"{self.kernel}: failed in the simulator of its device: {self.words}"


class OverrideScopeError(OpmuxError):
    """Scopes of `use` were left in another order than they were entered, as interleaved async tasks do."""


class OpmuxWarning(UserWarning):
    """Base class of every opmux warning."""


class SlowPathWarning(OpmuxWarning):
    """Automatic choice on an accelerator fell through to a reference or interpreted implementation."""


class PluginWarning(OpmuxWarning):
    """A plugin failed to load or conflicts with another one; the rest keeps working."""


class SimulatedBackendWarning(OpmuxWarning):
    """A kernel runs in a simulator of its device, which is slow."""


def near_matches(name: str, known: Iterable[str]) -> list[str]:
    """Up to two of `known` that `name` was probably meant to be."""
    return difflib.get_close_matches(name, list(known), n=2, cutoff=0.6)

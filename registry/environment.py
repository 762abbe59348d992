"""The grammar of `OPMUX_BACKEND` and its kin: text in, plain rules out.

    text    = entry { ";" entry }
    entry   = [ [ op ] [ "@" platform ] "=" ] backend { "," backend }

`*` or nothing stands for every op. Several backends are tried in order; if none is viable, that is an error.
The reserved backend `auto` gives the op back to automatic choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from opmux.core.errors import EnvSyntaxError, SettingError, near_matches

BACKEND = "OPMUX_BACKEND"
DISABLE = "OPMUX_DISABLE"
SIMULATE = "OPMUX_SIMULATE"
STRICT = "OPMUX_STRICT_PLUGINS"
VARIABLES = (BACKEND, DISABLE, SIMULATE, STRICT)

PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "gpu")
AUTO = "auto"

Simulate = Literal["auto", "never", "always"]
_SIMULATE: tuple[Simulate, ...] = ("auto", "never", "always")
_FLAGS = {"": False, "0": False, "false": False, "1": True, "true": True}

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")


@dataclass(frozen=True, slots=True)
class Rule:
    """Backends forced for an op (`*`: every op) on a platform (empty: every platform), in order."""

    op: str
    platform: str
    backends: tuple[str, ...]

    def __str__(self) -> str:
        place = f"@{self.platform}" if self.platform else ""
        return f"{self.op}{place}={','.join(self.backends)}"


@dataclass(frozen=True, slots=True)
class Rules:
    """What one source forces; at most one rule for each op and platform."""

    rules: tuple[Rule, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.rules)

    def __str__(self) -> str:
        return ";".join(map(str, self.rules))

    def lookup(self, op: str, platform: str) -> Rule | None:
        """The narrowest rule that speaks for an op on a platform; the op counts before the platform.

        A rule for an op speaks for its backward as well, unless one names the backward itself. A rule whose
        backends are `AUTO` speaks too: for automatic choice.
        """
        best: tuple[tuple[int, int], Rule] | None = None
        for rule in self.rules:
            if rule.op == op:
                by_op = 3
            elif op == f"{rule.op}_vjp":
                by_op = 2
            elif rule.op == "*":
                by_op = 1
            else:
                continue
            if rule.platform == platform or (rule.platform == "gpu" and platform in ("cuda", "rocm")):
                by_platform = 1
            elif not rule.platform:
                by_platform = 0
            else:
                continue
            if best is None or (by_op, by_platform) > best[0]:
                best = ((by_op, by_platform), rule)
        return None if best is None else best[1]


@lru_cache(maxsize=256)
def parse_rules(text: str, variable: str = BACKEND) -> Rules:
    """Parses the text of `OPMUX_BACKEND`, or of a `backend=` argument.

    Raises:
      EnvSyntaxError: the text does not follow the grammar; names the column.
    """
    rules: dict[tuple[str, str], Rule] = {}
    for start, entry in _split(text, 0, ";"):
        if not entry.strip():
            continue
        head, equals, tail = entry.partition("=")
        op, platform = "*", ""
        names_at = start
        if equals:
            op, platform = _target(text, variable, start, head)
            names_at = start + len(head) + 1
        else:
            tail = entry
        if "=" in tail:
            raise EnvSyntaxError(variable, text, names_at + tail.index("=") + 1, "a second '=' in one entry")
        backends = tuple(_name(text, variable, at, name, "a backend name") for at, name in _split(tail, names_at, ","))
        if len(set(backends)) != len(backends):
            raise EnvSyntaxError(variable, text, names_at + 1, "a backend is named twice")
        if AUTO in backends and backends != (AUTO,):
            raise EnvSyntaxError(variable, text, names_at + 1, f"{AUTO!r} stands alone: it ends the forcing")
        if (op, platform) in rules:
            raise EnvSyntaxError(
                variable, text, start + 1, f"a second entry for {op + ('@' + platform) * bool(platform)}"
            )
        rules[op, platform] = Rule(op, platform, backends)
    return Rules(tuple(sorted(rules.values(), key=lambda rule: (rule.op, rule.platform))))


def _split(text: str, offset: int, separator: str) -> Iterator[tuple[int, str]]:
    for part in text.split(separator):
        yield offset, part
        offset += len(part) + len(separator)


def _name(text: str, variable: str, at: int, raw: str, what: str) -> str:
    name = raw.strip()
    column = at + len(raw) - len(raw.lstrip()) + 1
    if not name:
        raise EnvSyntaxError(variable, text, min(column, len(text) + 1), f"expected {what}")
    match = NAME.match(name)
    if match is None or match.end() != len(name):
        bad = column + (match.end() if match else 0)
        raise EnvSyntaxError(variable, text, bad, f"{name[bad - column]!r} cannot stand in {what}")
    return name


def _target(text: str, variable: str, at: int, head: str) -> tuple[str, str]:
    raw_op, sign, raw_platform = head.partition("@")
    op = raw_op.strip()
    if op not in ("", "*"):
        op = _name(text, variable, at, raw_op, "an op name")
    elif not op and not sign:
        raise EnvSyntaxError(variable, text, at + 1, "expected an op name, '*' or '@PLATFORM' before '='")
    platform = ""
    if sign:
        platform_at = at + len(raw_op) + 1
        platform = _name(text, variable, platform_at, raw_platform, "a platform")
        if platform not in PLATFORMS:
            near = near_matches(platform, PLATFORMS)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            problem = f"unknown platform {platform!r}{meant}; known: {', '.join(PLATFORMS)}"
            blanks = len(raw_platform) - len(raw_platform.lstrip())
            raise EnvSyntaxError(variable, text, platform_at + blanks + 1, problem)
    return op or "*", platform


def rules_from(value: str | Mapping[str, str | tuple[str, ...] | list[str]] | None, where: str) -> Rules:
    """Rules from a `backend=` argument: the grammar's text, or a mapping of `op[@platform]` to names.

    Raises:
      SettingError: it is neither, or does not follow the grammar.
    """
    if value is None:
        return Rules()
    if isinstance(value, str):
        return parse_rules(value, where)
    if not isinstance(value, Mapping):
        raise SettingError(
            f"{where}: got a {type(value).__name__}; allowed: a backend name, the text that {BACKEND} takes, "
            "or a mapping of op to name"
        )
    entries: list[str] = []
    for op, names in value.items():
        listed = (names,) if isinstance(names, str) else names
        if not isinstance(listed, tuple | list) or not all(isinstance(name, str) for name in listed):
            raise SettingError(f"{where}: {op!r}: got {names!r}; allowed: a backend name, or a sequence of them")
        entries.append(f"{op}={','.join(listed)}")
    return parse_rules(";".join(entries), where)


def parse_disable(text: str) -> frozenset[str]:
    """Names of plugins that are never imported, from the text of `OPMUX_DISABLE`."""
    return frozenset(
        _name(text, DISABLE, at, name, "a plugin name") for at, name in _split(text, 0, ",") if name.strip()
    )


def parse_simulate(text: str, where: str = SIMULATE) -> Simulate:
    """The simulation policy; empty means `auto`."""
    for known in _SIMULATE:
        if text.strip().lower() in (known, "" if known == "auto" else known):
            return known
    raise SettingError(f"{where}: got {text!r}; allowed: {', '.join(_SIMULATE)}")


def parse_flag(text: str, variable: str) -> bool:
    """A boolean variable."""
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise SettingError(f"{variable}: got {text!r}; allowed: 1, true, 0, false or unset") from None


# A lookup in os.environ encodes the key and decodes the value, 0.7 us a variable; four of them on every call
# would cost more than a small op. CPython keeps the encoded mapping at hand, so compare that.
_DATA: Any = getattr(os.environ, "_data", os.environ)
_KEYS = tuple(getattr(os.environ, "encodekey", str)(name) for name in VARIABLES)
_K0, _K1, _K2, _K3 = _KEYS


def raw() -> tuple[object, object, object, object]:
    """The variables as the process holds them, only good for comparing with an earlier answer."""
    get = _DATA.get
    return get(_K0), get(_K1), get(_K2), get(_K3)


def read() -> dict[str, str]:
    """The variables that are set and not empty."""
    return {name: value for name in VARIABLES if (value := os.environ.get(name, "").strip())}

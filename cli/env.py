"""`opmux env`: what was read from the environment, and the policy that results."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from typing import Any

from opmux.cli import layout
from opmux.core.errors import OpmuxError

_EPILOG = """\
examples:
  OPMUX_BACKEND=interpret opmux env
  OPMUX_BACKEND="attention@cuda=mosaic_gpu,xla;*=xla" opmux env --json
"""


def add_parser(subparsers: layout.Subparsers) -> None:
    """Adds the command `env`."""
    parser = subparsers.add_parser(
        "env",
        help="what was read from the environment",
        description="Prints the four variables that opmux reads, as text and as understood, and the policy in effect. "
        "Exit code 2: one of them has a value that it cannot have.",
        epilog=_EPILOG,
        formatter_class=layout.Help,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the variables; 2 if one of them is in error."""
    found = collect()
    print(json.dumps(found) if given.json else "\n".join(_text(found)))
    return 2 if any(entry["error"] for entry in found["variables"].values()) else 0


def collect() -> dict[str, Any]:
    """The variables and the policy as plain data."""
    from opmux.registry import environment, policy, tables

    disabled = frozenset(_variable(os.environ.get(environment.DISABLE), environment.parse_disable)["value"] or ())

    def rules(text: str) -> Any:
        return [
            {"op": rule.op, "platform": rule.platform, "backends": list(rule.backends)}
            for rule in tables.check(environment.parse_rules(text), environment.BACKEND, disabled).rules
        ]

    read: dict[str, Callable[[str], Any]] = {
        environment.BACKEND: rules,
        environment.DISABLE: lambda text: sorted(environment.parse_disable(text)),
        environment.SIMULATE: environment.parse_simulate,
        environment.STRICT: lambda text: environment.parse_flag(text, environment.STRICT),
    }
    variables = {name: _variable(os.environ.get(name), parse) for name, parse in read.items()}
    if any(entry["error"] for entry in variables.values()):
        return {"variables": variables, "policy": None}
    wanted = policy.current()
    return {
        "variables": variables,
        "policy": {
            "layers": [{"source": source, "text": str(settings)} for source, settings in wanted.layers()],
            "device": wanted.device.name if wanted.device is not None else None,
            "prefer": list(wanted.preferred),
            "disabled": sorted(wanted.disabled),
            "simulate": wanted.simulate,
            "strict": wanted.strict,
        },
    }


def _variable(text: str | None, parse: Callable[[str], Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "text": text,
        "source": "environment" if (text or "").strip() else "default",
        "value": None,
        "error": None,
    }
    try:
        found["value"] = parse((text or "").strip())
    except OpmuxError as error:
        found["error"] = str(error)
    return found


def _text(found: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for name, entry in found["variables"].items():
        text = (
            "unset" if entry["text"] is None else f"{entry['text']!r}" + " (empty: unset)" * (not entry["text"].strip())
        )
        lines += layout.wrap(f"{name:<21} ", text)
        if entry["error"]:
            lines += layout.block("  error     ", entry["error"])
        else:
            lines += layout.wrap("  read as   ", _value(entry["value"]))
            lines += layout.wrap("  source    ", entry["source"])
    if found["policy"] is not None:
        lines += ["", "policy in effect, first source first"]
        for layer in found["policy"]["layers"]:
            lines += layout.wrap(f"  {layer['source']:<12}", layer["text"])
        lines += layout.wrap("  simulate    ", found["policy"]["simulate"])
        lines += layout.wrap("  disabled    ", ", ".join(found["policy"]["disabled"]) or "none")
    return lines


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if value and isinstance(value[0], dict):
        return "; ".join(
            f"{rule['op']} on {rule['platform'] or 'every platform'}: {' then '.join(rule['backends'])}"
            for rule in value
        )
    return ", ".join(value) or "none"

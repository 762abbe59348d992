"""`opmux list`: ops against backends, and what became of every plugin."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from opmux.cli import layout

if TYPE_CHECKING:
    from opmux.core.devices import Device
    from opmux.core.implementation import Implementation
    from opmux.registry.policy import Policy

_EPILOG = """\
examples:
  opmux list
  opmux list --device tpu-v6e --json
"""
_LEGEND = {
    "*": "first in automatic choice on this device",
    "!": "forced: see `opmux env`",
    "away": "for other platforms only",
    "bwd": "with a backward kernel of its own",
}


def add_parser(subparsers: layout.Subparsers) -> None:
    """Adds the command `list`."""
    parser = subparsers.add_parser(
        "list",
        help="ops and backends, with priorities on a device",
        description="Prints which backend has which op, with its priority on a device, and which plugins failed or "
        "are disabled. A given call may still be refused by a backend: `opmux explain` says by which, and why.",
        epilog=_EPILOG,
        formatter_class=layout.Help,
    )
    parser.add_argument("--device", metavar="NAME", help="a declared device, such as h200 or tpu-v6e; it may be absent")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the table."""
    found = collect(given.device)
    print(json.dumps(found) if given.json else "\n".join(_text(found)))
    return 0


def collect(device: str | None = None) -> dict[str, Any]:
    """The table as plain data, for a device or for the default one.

    Raises:
      UnknownDeviceError: no device is declared under this name.
    """
    from opmux import registry
    from opmux.core import compat, devices
    from opmux.registry import policy, tables

    wanted = policy.current()
    place = devices.device(device) if device else wanted.device or devices.from_jax(compat.default_device())
    infos = registry.backends()
    implementations = registry.implementations()
    at_home = {name for name, info in infos.items() if not info.platforms or place.platform in info.platforms}
    rows = {op: _cells(op, implementations, at_home, place, wanted) for op in registry.ops()}
    return {
        "device": {"name": place.name, "platform": place.platform},
        "ops": rows,
        "backends": {
            name: {
                "summary": info.summary,
                "tier": info.tier,
                "platforms": list(info.platforms),
                "origin": str(plugin.found) if (plugin := _loaded(name)) else "",
                "simulator": bool(info.simulator),
            }
            for name, info in infos.items()
        },
        "failed": [
            {"name": found.name, "stage": found.stage, "reason": found.reason, "origin": str(found.found)}
            for found in registry.failures()
        ],
        "disabled": sorted(wanted.disabled & set(tables.loader.names())),
    }


def _loaded(name: str) -> Any:
    from opmux.registry import tables
    from opmux.registry.loader import Plugin

    plugin = tables.loader.load(name)
    return plugin if isinstance(plugin, Plugin) else None


def _cells(
    op: str, implementations: list[Implementation], at_home: set[str], place: Device, wanted: Policy
) -> dict[str, dict[str, Any]]:
    """State and priority of every backend that has an op, and whether it has a backward kernel.

    The order is that of automatic choice, as far as it depends on the device alone: the request and the hooks of
    plugins have their say only when there is a request.
    """
    from opmux.registry.environment import AUTO

    own = [found for found in implementations if found.op == op]
    backward = {found.backend for found in implementations if found.op == f"{op}_vjp"}
    rules = [settings.rules.lookup(op, place.platform) for _, settings in wanted.layers()]
    forced = next((rule.backends for rule in rules if rule is not None and rule.backends != (AUTO,)), ())
    preferred = wanted.preferred
    first = min(
        (found for found in own if found.backend in at_home),
        key=lambda found: (
            preferred.index(found.backend) if found.backend in preferred else len(preferred),
            -found.priority_on(place),
            -found.narrowness_on(place),
            not found.builtin,
            found.backend,
        ),
        default=None,
    )

    def state(found: Implementation) -> str:
        if found.backend in forced:
            return "forced"
        if found.backend not in at_home:
            return "away"
        return "first" if found is first and not forced else "viable"

    return {
        found.backend: {
            "state": state(found), "priority": found.priority_on(place), "backward": found.backend in backward
        }
        for found in own
    }  # fmt: skip


def _text(found: dict[str, Any]) -> list[str]:
    def cell(entry: dict[str, Any] | None) -> str:
        if entry is None:
            return "-"
        mark = {"first": "*", "forced": "!", "away": "away"}.get(entry["state"], "")
        return " ".join(filter(None, [str(entry["priority"]), mark, "bwd" if entry["backward"] else ""]))

    names = list(found["backends"])
    rows = [(op, [cell(entries.get(name)) for name in names]) for op, entries in found["ops"].items()]
    used = {part for _, cells in rows for text in cells for part in text.split()}
    device = found["device"]
    lines = layout.wrap("", f"Priorities on {device['name']} ({device['platform']}); - has no such op")
    lines += [line for mark, says in _LEGEND.items() if mark in used for line in layout.wrap(f"{mark:<5}", says)]
    lines += ["", *layout.matrix("op", names, rows), ""]
    lines += layout.table(
        [
            (name, info["tier"], ",".join(info["platforms"]) or "any", f"{info['summary']} [{info['origin']}]")
            for name, info in found["backends"].items()
        ]
    )
    if found["disabled"]:
        lines += ["", *layout.wrap("disabled  ", ", ".join(found["disabled"]))]
    if found["failed"]:
        lines += [""]
        for failure in found["failed"]:
            lines += layout.wrap("failed    ", f"{failure['name']}: {failure['reason']} [{failure['origin']}]")
        lines += layout.wrap("", "`opmux doctor` prints the tracebacks.")
    return lines

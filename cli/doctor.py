"""`opmux doctor`: every plugin imported, every kernel found, every failure with its cause."""

from __future__ import annotations

import argparse
import json
import traceback
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from opmux.cli import installed, layout, version
from opmux.core.errors import OpmuxError

if TYPE_CHECKING:
    from opmux.core.implementation import Implementation
    from opmux.registry.loader import Plugin, PluginFailure

_TAIL = 6
"""Lines of a traceback that are printed."""

_EPILOG = """\
examples:
  opmux doctor
  OPMUX_DISABLE=acme opmux doctor --json

Exit codes: 0 all is well, or there are notes only; 1 a check failed.
"""


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be.

    Attributes:
      check: `import`, `validate`, `conflict`, `kernel`, `metadata`, `environment` or `devices`.
      subject: what it is about: a plugin, a variable, a distribution.
      detail: what is the matter, the root cause first.
      failed: it is a failure, and no mere note.
      traceback: the whole traceback, if there is one.
    """

    check: str
    subject: str
    detail: str
    failed: bool = True
    traceback: str = ""


def add_parser(subparsers: layout.Subparsers) -> None:
    """Adds the command `doctor`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check plugins, kernels, environment and installation",
        description="Imports every plugin and every kernel, and prints what fails with the end of its traceback, "
        "plugins that claim one name, and installations that hide one another.",
        epilog=_EPILOG,
        formatter_class=layout.Help,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, with whole tracebacks")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the findings; 1 if one of them is a failure."""
    found = collect()
    print(json.dumps(found) if given.json else "\n".join(_text(found)))
    return 0 if found["ok"] else 1


def collect() -> dict[str, Any]:
    """Versions, plugins and findings as plain data."""
    from opmux.registry import tables
    from opmux.registry.loader import Plugin

    findings, disabled = _environment()
    loader = tables.loader
    plugins: list[dict[str, Any]] = []
    for name in loader.names():
        if name in disabled:
            plugins.append({"name": name, "state": "disabled"})
            continue
        plugin = loader.load(name)
        if not isinstance(plugin, Plugin):
            plugins.append({"name": name, "state": "failed"})
            continue
        broken = _kernels(plugin)
        findings += broken
        plugins.append(
            {
                "name": name,
                "state": "failed" if any(finding.failed for finding in broken) else "lacking" if broken else "ok",
                "origin": str(plugin.found),
                "implementations": len(plugin.contents.implementations),
                "ops": [op.name for op in plugin.contents.ops],
                "seconds": round(plugin.seconds, 4),
            }
        )
    findings += [_failure(failure) for failure in loader.failures()]
    findings += _metadata()
    devices, absent = _devices()
    findings += absent
    return {
        "ok": not any(finding.failed for finding in findings),
        "versions": version.versions(),
        "devices": devices,
        "plugins": plugins,
        "findings": [asdict(finding) for finding in findings],
    }


def _environment() -> tuple[list[Finding], frozenset[str]]:
    """Variables with a value that they cannot have, and the plugins that are disabled."""
    from opmux.cli import env

    variables = env.collect()["variables"]
    findings = [Finding("environment", name, entry["error"]) for name, entry in variables.items() if entry["error"]]
    return findings, frozenset(variables["OPMUX_DISABLE"]["value"] or ())


def _kernels(plugin: Plugin) -> list[Finding]:
    """Kernels of a plugin that cannot be imported: each would fail when it is first chosen."""
    findings: list[Finding] = []
    for implementation in plugin.contents.implementations:
        try:
            implementation.load()
        except (Exception, SystemExit) as error:
            hint = _lacks(plugin, implementation, error)
            findings.append(
                Finding(
                    "kernel",
                    f"{plugin.name}: {implementation.op}",
                    f"{implementation.kernel}: {type(error).__name__}: {error}{'; needs ' * bool(hint)}{hint}",
                    failed=not hint,
                    traceback="".join(traceback.format_exception(error)),
                )
            )
    return findings


def _lacks(plugin: Plugin, implementation: Implementation, error: BaseException) -> str:
    """How to install what a kernel lacks, if that is all: nobody needs it where its device is absent."""
    from opmux.registry import placement

    info = plugin.contents.info
    if info is None or not isinstance(error, ModuleNotFoundError) or not isinstance(implementation.kernel, str):
        return ""
    own = (error.name or "").partition(".")[0] == implementation.kernel.partition(".")[0]
    at_home = any(device.platform in info.platforms for device in placement.present())
    return "" if own or at_home or not info.platforms else info.install_hint


def _failure(failure: PluginFailure) -> Finding:
    return Finding(failure.stage, failure.name, f"{failure.reason} [{failure.found}]", traceback=failure.traceback)


def _metadata() -> list[Finding]:
    """Installations that hide another one; a failure where a plugin is hidden thereby."""
    findings: list[Finding] = []
    for first, hidden in installed.shadowed():
        lost = sorted(name for name, _ in hidden.points - first.points)
        detail = f"{first} hides {hidden}"
        detail += f", and with it the plugins {', '.join(lost)}; remove one of the two" if lost else ""
        findings.append(Finding("metadata", hidden.name, detail, failed=bool(lost)))
    return findings


def _devices() -> tuple[list[str], list[Finding]]:
    """Names of the devices that JAX has here."""
    from opmux.registry import placement

    try:
        return [device.name for device in placement.present()], []
    except (RuntimeError, OpmuxError) as error:
        return [], [Finding("devices", "jax", str(error), traceback=traceback.format_exc())]


def _text(found: dict[str, Any]) -> list[str]:
    lines = layout.wrap("versions  ", ", ".join(f"{name} {text}" for name, text in found["versions"].items()))
    lines += layout.wrap("devices   ", ", ".join(found["devices"]) or "none")
    rows: list[tuple[str, str, str]] = []
    for plugin in found["plugins"]:
        says = ""
        if "origin" in plugin:
            says = f"{plugin['origin']}: {plugin['implementations']} implementations, {plugin['seconds'] * 1e3:.0f} ms"
            says += f", adds the ops {', '.join(plugin['ops'])}" if plugin["ops"] else ""
        rows.append((plugin["name"], plugin["state"], says))
    lines += ["", "plugins", *(f"  {line}" for line in layout.table(rows, layout.width() - 2))]
    for finding in found["findings"]:
        head = f"{'FAILED' if finding['failed'] else 'note'}  {finding['check']}  "
        lines += ["", *layout.wrap(head, f"{finding['subject']}: {finding['detail']}")]
        for line in finding["traceback"].splitlines()[-_TAIL:]:
            lines += layout.wrap("    ", line)
    failed = sum(finding["failed"] for finding in found["findings"])
    notes = len(found["findings"]) - failed
    verdict = f"{failed} check{'s' * (failed != 1)} failed" if failed else "all is well"
    return [*lines, "", verdict + (f", {notes} note{'s' * (notes != 1)}" if notes else "")]

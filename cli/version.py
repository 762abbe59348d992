"""`opmux version`: versions of opmux and of what it stands on, read from metadata."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata

from opmux.cli import layout

_DISTRIBUTIONS = ("opmux", "jax", "jaxlib", "numpy", "pydantic", "pluggy")


def add_parser(subparsers: layout.Subparsers) -> None:
    """Adds the command `version`."""
    parser = subparsers.add_parser(
        "version",
        help="versions of opmux, jax, jaxlib, python, numpy, pydantic, pluggy",
        description="Prints the versions of opmux and of what it stands on. Imports neither JAX nor a plugin.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the versions."""
    found = versions()
    print(json.dumps(found) if given.json else "\n".join(layout.table(list(found.items()))))
    return 0


def versions() -> dict[str, str]:
    """Version of each distribution, and of Python."""
    found = {name: _version(name) for name in _DISTRIBUTIONS}
    return {"opmux": found.pop("opmux"), "python": platform.python_version(), **found}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"

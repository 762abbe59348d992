"""Renews the output of every command in `docs/cli.md`: `python docs/make_cli.py`."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from opmux.cli.main import main
from opmux.registry import environment

PAGE = Path(__file__).with_name("cli.md")
# What differs from one machine, or one moment, to another.
VARYING = re.compile(r"\d+ ms|\d+(\.\d+)+")


def outputs(command: str) -> str:
    """What a command prints on stdout and stderr."""
    words = shlex.split(command)
    variables: dict[str, str] = {}
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    assert words.pop(0) == "opmux", command
    printed = io.StringIO()
    plain = {name: value for name, value in os.environ.items() if name not in environment.VARIABLES}
    with (
        mock.patch.dict(os.environ, {**plain, "COLUMNS": "80", **variables}, clear=True),
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        main(words)
    return printed.getvalue()


def renewed(page: str) -> Iterator[str]:
    """The lines of a page, with new output behind every `$ ...` of its console blocks."""
    inside = False
    for line in page.splitlines():
        if line.startswith("```"):
            inside = line == "```console"
        elif inside and line.startswith("$ "):
            yield line
            yield outputs(line[2:]).rstrip()
            continue
        elif inside:
            continue
        yield line


def same(left: str, right: str) -> bool:
    """Whether two pages differ in versions and times at most."""
    left, right = (VARYING.sub("#", " ".join(page.split())) for page in (left, right))
    return left == right


if __name__ == "__main__":
    PAGE.write_text("\n".join(renewed(PAGE.read_text(encoding="utf-8"))) + "\n", encoding="utf-8")

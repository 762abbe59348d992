"""Text that fits the terminal: wrapped paragraphs, tables, matrices in blocks of columns, help, usage errors."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

# What `add_subparsers` returns; argparse has no public name for it.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"  # pyright: ignore[reportPrivateUsage]

_NARROWEST = 40


def width() -> int:
    """Columns of the terminal, 80 where there is none."""
    return max(_NARROWEST, shutil.get_terminal_size().columns)


def wrap(head: str, text: str, columns: int | None = None) -> list[str]:
    """Lines of a text behind a head, under which later lines are indented."""
    columns = columns or width()
    indent = " " * min(len(head), columns // 2)
    lines = textwrap.wrap(text, columns, initial_indent=head, subsequent_indent=indent, break_on_hyphens=False)
    return lines or [head.rstrip()]


def block(head: str, text: str, columns: int | None = None) -> list[str]:
    """Lines of a text that has lines of its own, each wrapped, behind a head."""
    lines: list[str] = []
    for part in text.splitlines():
        lines += wrap(" " * len(head) if lines else head, part, columns)
    return lines


def table(rows: Sequence[Sequence[str]], columns: int | None = None) -> list[str]:
    """Aligned columns; the last one wraps, the others are clipped if they take more than half of the width."""
    columns = columns or width()
    if not rows:
        return []
    fixed = len(rows[0]) - 1
    fair = max(8, columns // 2 // max(1, fixed))
    widest = [max(len(row[i]) for row in rows) for i in range(fixed)]
    if sum(widest) + 2 * fixed > columns // 2:
        widest = [min(size, fair) for size in widest]
    lines: list[str] = []
    for row in rows:
        head = "".join(f"{clip(row[i], size):<{size}}  " for i, size in enumerate(widest))
        lines += wrap(head, row[-1], columns)
    return lines


def matrix(corner: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """A table of many narrow columns, in blocks of as many as fit, each block with the row names again."""
    columns = width()
    first = min(max(len(corner), *(len(name) for name, _ in rows)), columns // 2) if rows else len(corner)
    sizes = [
        min(max(len(name), *(len(cells[i]) for _, cells in rows)), columns - first - 2) if rows else len(name)
        for i, name in enumerate(names)
    ]
    lines: list[str] = []
    start = 0
    while start < len(names):
        end, used = start, first
        while end < len(names) and (end == start or used + 2 + sizes[end] <= columns):
            used += 2 + sizes[end]
            end += 1
        for label, cells in ((corner, names), *rows):
            line = f"{clip(label, first):<{first}}"
            line += "".join(f"  {clip(cells[i], sizes[i]):<{sizes[i]}}" for i in range(start, end))
            lines.append(line.rstrip())
        if end < len(names):
            lines.append("")
        start = end
    return lines


def clip(text: str, size: int) -> str:
    """The text, with its end replaced by dots if it is longer than `size`."""
    return text if len(text) <= size else text[: max(0, size - 3)] + "..."


class Help(argparse.HelpFormatter):
    """Wraps a description of one line, and leaves alone what has lines of its own, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """A parser whose complaints fit the terminal, and which uses no colours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes what `argparse.ArgumentParser` takes."""
        super().__init__(*args, **kwargs)
        self.color = False  # Python 3.14 has them on by default

    def error(self, message: str) -> NoReturn:
        """Prints usage and message, and exits with code 2."""
        self.print_usage(sys.stderr)
        self.exit(2, "\n".join(block("", f"{self.prog}: error: {message}")) + "\n")

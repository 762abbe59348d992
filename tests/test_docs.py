"""Every Python block of the documentation runs, page by page, and prints what the page says it prints."""

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# A fence with nothing but a language; `output` holds what the Python block before it prints, with ... for anything.
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page):
    """Language, first line and text of each fenced block of a page."""
    text = page.read_text()
    return [(found[1], text[: found.start(2)].count("\n"), found[2]) for found in BLOCK.finditer(text)]


def runnable(pages):
    return [page for page in pages if any(language == "python" for language, _, _ in blocks(page))]


def test_pages_are_found():
    assert {page.name for page in runnable(PAGES)} >= {"README.md", "selection.md", "plugins.md"}


@pytest.mark.parametrize("page", runnable(PAGES), ids=lambda page: page.name)
def test_python_blocks_run(page, isolated_registry, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": f"docs_{page.stem}"}
    printed = ""
    for language, line, text in blocks(page):
        if language == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * line + text, str(page), "exec"), namespace)
            printed = out.getvalue()
        elif language == "output":
            found = "\n".join(map(str.rstrip, printed.splitlines())) + "\n"
            matches = doctest.OutputChecker().check_output(text, found, doctest.ELLIPSIS)
            assert matches, f"{page.name}:{line + 1} says\n{text}\nbut what is printed is\n{found}"

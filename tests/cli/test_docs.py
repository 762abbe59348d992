import runpy
from pathlib import Path

import jax
import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the page is from a machine that has only a CPU")
def test_the_page_shows_what_the_commands_print() -> None:
    made = runpy.run_path(str(DOCS / "make_cli.py"))
    page = made["PAGE"].read_text(encoding="utf-8")
    renewed = "\n".join(made["renewed"](page))
    assert renewed.count("$ opmux") > 8
    assert made["same"](page, renewed), "run docs/make_cli.py"

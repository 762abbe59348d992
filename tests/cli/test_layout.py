import pytest

from opmux.cli import layout


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_width_is_that_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout.width() == 80
    monkeypatch.setenv("COLUMNS", "132")
    assert layout.width() == 132
    monkeypatch.setenv("COLUMNS", "3")
    assert layout.width() == 40


def test_wrap_indents_under_the_head_and_breaks_what_is_too_long() -> None:
    lines = layout.wrap("head  ", "word " * 20 + "x" * 100)
    assert lines[0].startswith("head  word")
    assert all(line.startswith(" " * 6) for line in lines[1:])
    assert max(map(len, lines)) <= 80
    assert "".join(line.strip() for line in lines).count("x") == 100


def test_block_keeps_lines_of_their_own() -> None:
    assert layout.block("e  ", "one\n  two\n    ^") == ["e  one", "     two", "       ^"]


def test_table_aligns_and_wraps_the_last_column() -> None:
    lines = layout.table([("a", "kernel", "word " * 30), ("longer", "x", "short")])
    assert lines[0].startswith("a       kernel  word")
    assert lines[-1] == "longer  x       short"
    assert max(map(len, lines)) <= 80


def test_table_clips_columns_that_would_starve_the_last() -> None:
    lines = layout.table([("n" * 100, "m" * 100, "says " * 10)])
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("nnn")
    assert "..." in lines[0]


@pytest.mark.parametrize("count", [1, 3, 20])
def test_matrix_fits_by_splitting_columns_into_blocks(count: int) -> None:
    names = [f"backend_{i:02}" for i in range(count)]
    rows = [(f"op{r}", [f"{r}.{i}" for i in range(count)]) for r in range(3)]
    lines = layout.matrix("op", names, rows)
    assert max(map(len, lines)) <= 80
    cells = " ".join(lines).split()
    assert {f"{r}.{i}" for r in range(3) for i in range(count)} | set(names) <= set(cells)
    assert cells.count("op0") == 1 + lines.count("")  # once in every block


def test_matrix_without_rows_or_columns() -> None:
    assert layout.matrix("op", ["xla"], []) == ["op  xla"]
    assert layout.matrix("op", [], [("add", [])]) == []


def test_matrix_clips_a_name_that_is_wider_than_the_terminal() -> None:
    lines = layout.matrix("op", ["b" * 200], [("o" * 200, ["10 *"])])
    assert max(map(len, lines)) <= 80
    assert "10 *" in lines[1]

"""The process of `benchmarks/gpu.py` that uses the GPU: what becomes of the run when it dies, hangs or is lost."""

import os
import time

import pytest

CHILD = """
import json, os, signal, sys, time

order = json.loads(sys.argv[1])
pipe = os.fdopen(order["pipe"], "w")
gone = {(task, part) for task, part in order["without"]}


def say(what, **values):
    pipe.write(json.dumps({"say": what, **values}) + "\\n")
    pipe.flush()


for task in ("numerics add a", "numerics add b", "speed add c", "numerics add d", "numerics add e"):
    if task in order["done"]:
        continue
    say("begin", task=task, part="")
    for part in ("forward", "backward"):
        if (task, part) in gone:
            continue
        say("begin", task=task, part=part)
        if (task, part) == ("numerics add a", "backward"):
            print("an assertion failed", flush=True)
            os.abort()
        if (task, part) == ("numerics add b", "forward"):
            time.sleep(600)
        row = {"task": task, "kind": "numerics", "op": "add", "part": part, "status": "ok"}
        if (task, part) == ("numerics add d", "forward"):
            say("row", row={**row, "status": "failed", "detail": "illegal address"})
            sys.exit(75)
        say("row", row=row)
    say("end", task=task)
say("finished")
"""


class Rows(list):
    facts = None
    add = list.append


@pytest.fixture
def supervised(part, tmp_path, monkeypatch):
    """Watches a worker that only pretends."""
    child = part("gpu_child")

    def rows(text, patience=1.5, minutes=1.0):
        worker, log, found = tmp_path / "worker.py", tmp_path / "log", Rows()
        worker.write_text(text)
        monkeypatch.setattr(child, "WORKER", worker)
        order = {"done": [], "without": [], "deadline": time.time() + 60 * minutes}
        ended = child.work(order, found, dict(os.environ), log, patience)
        return ended, {(row["task"], row["part"]): row for row in found}

    return rows


def test_kernels_that_abort_hang_or_lose_the_device_end_one_row_each(supervised):
    ended, rows = supervised(CHILD)
    assert ended
    bad = {key: (row["status"], row["detail"]) for key, row in rows.items() if row["status"] != "ok"}
    assert bad == {
        ("numerics add a", "backward"): ("crashed", "exit code -6: an assertion failed"),
        ("numerics add b", "forward"): ("hung", "no word for 2 s"),
        ("numerics add d", "forward"): ("failed", "illegal address"),
    }
    assert len(rows) == 10  # both parts of all five


def test_a_child_that_does_not_start_ends_the_run(supervised, capfd):
    ended, rows = supervised("raise SystemExit('no device')")
    assert (ended, rows) == (False, {})
    assert "no device" in capfd.readouterr().err


def test_no_child_outlives_the_deadline(supervised, part, monkeypatch):
    monkeypatch.setattr(part("gpu_child"), "GRACE", 0.5)
    start = time.time()
    ended, rows = supervised(CHILD, patience=60.0, minutes=0.02)
    assert not ended
    assert time.time() - start < 20
    assert rows["numerics add b", "forward"]["status"] == "hung" or ("numerics add b", "forward") not in rows

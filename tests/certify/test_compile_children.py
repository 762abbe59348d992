"""Child processes: what becomes of jobs that work, raise, die or hang."""

import os
import time

import pytest

from opmux.certify import children
from opmux.certify.children import Job, last_words, run_job, run_jobs

JOBS = """
import os, subprocess, sys, time

def double(payload):
    print('{"value": "noise on stdout"}', flush=True)
    return {"twice": 2 * payload, "pid": os.getpid()}

def fail(payload):
    raise ValueError("no such thing")

def die(payload):
    for line in ("I0000 chatter", "F1129 12:00:00.0 42 pass.cc:7] Check failed: it fits", "    @ 0x55 frame()"):
        print(line, file=sys.stderr, flush=True)
    os.abort()

def leave(payload):
    os._exit(3)

def hang(payload):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("child", child.pid, flush=True)
    time.sleep(600)

def variable(payload):
    return os.environ.get(payload)
"""


@pytest.fixture(autouse=True)
def jobs(tmp_path, monkeypatch):
    (tmp_path / "certify_jobs.py").write_text(JOBS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(children, "STARTUP", 30.0)


def job(name, payload=None, limit=30.0, **options):
    return Job(f"certify_jobs:{name}", payload, limit, **options)


def test_many_jobs_share_a_child_and_noise_is_no_answer():
    found = list(run_jobs([job("double", n) for n in range(5)], parallel=1))
    assert sorted(outcome.value["twice"] for outcome in found) == [0, 2, 4, 6, 8]
    assert len({outcome.value["pid"] for outcome in found}) == 1
    assert "noise on stdout" in found[0].log


def test_neighbours_of_one_batch_share_a_child():
    jobs = [job("double", n, batch=f"batch {n // 2}" if n < 6 else "") for n in range(8)]
    found = {outcome.value["twice"] // 2: outcome.value["pid"] for outcome in run_jobs(jobs, parallel=2)}
    assert len(found) == 8
    assert all(found[2 * n] == found[2 * n + 1] for n in range(3))


def test_what_goes_wrong_is_an_outcome_and_the_rest_is_done():
    asked = [job("fail"), job("double", 1), job("die"), job("double", 2), job("leave"), job("double", 3)]
    found = {id(outcome.job): outcome for outcome in run_jobs(asked, parallel=1)}
    failed, one, died, two, left, three = (found[id(each)] for each in asked)
    assert (failed.status, failed.words) == ("failed", "ValueError: no such thing")
    assert "Traceback" in failed.log
    assert died.status == "aborted"
    assert died.words == "SIGABRT: pass.cc:7] Check failed: it fits"
    assert (left.status, left.words) == ("aborted", "exit status 3: it said nothing.")
    assert [outcome.value["twice"] for outcome in (one, two, three)] == [2, 4, 6]
    assert len({outcome.value["pid"] for outcome in (one, two, three)}) == 3


def test_a_hanging_job_is_killed_with_all_it_started():
    children.STARTUP = 5.0
    start = time.monotonic()
    hung, after = run_jobs([job("hang", limit=1.0), job("double", 1)], parallel=1)
    assert (hung.status, hung.words) == ("timeout", "no answer within 1 s; killed.")
    assert time.monotonic() - start < 60
    assert after.value["twice"] == 2
    grandchild = int(hung.log.split()[1])
    assert _gone(grandchild)


def test_leaving_early_kills_what_runs():
    found = run_jobs([job("double", 1), job("hang", limit=500.0)], parallel=2)
    start = time.monotonic()
    next(found)
    found.close()
    assert time.monotonic() - start < 60


def test_environment_and_groups_separate_children(monkeypatch):
    monkeypatch.setenv("TOY", "parent")
    asked = [
        job("variable", "TOY"),
        job("variable", "TOY", environment={"TOY": "child"}),
        job("variable", "TOY", environment={"TOY": None}),
    ]
    found = {id(outcome.job): outcome.value for outcome in run_jobs(asked, parallel=1)}
    assert [found[id(each)] for each in asked] == ["parent", "child", None]
    pids = {outcome.value["pid"] for outcome in run_jobs([job("double", 1, group=g) for g in "aab"], parallel=1)}
    assert len(pids) == 2


def test_a_function_that_is_not_there_and_an_answer_that_is_no_json():
    missing = run_job(Job("certify_jobs:nothing", 1))
    assert missing.status == "failed"
    assert "nothing" in missing.words
    assert run_job(Job("builtins:set", [1])).words.startswith("TypeError: Object of type set is not JSON")


def test_no_jobs():
    assert list(run_jobs([])) == []


def test_last_words_keep_the_message_and_drop_frames():
    log = "W1129 harmless\n" + "\n".join(f"line {n}" for n in range(30))
    assert last_words(log, lines=2) == "line 28\nline 29"
    assert (
        last_words("x\nLLVM ERROR: Cannot select\n*** SIGABRT ***\nPC: @ 0x7\nthe end")
        == "LLVM ERROR: Cannot select\nthe end"
    )
    assert last_words("") == "it said nothing."


def _gone(pid):
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        if _zombie(pid):
            return True
        time.sleep(0.1)
    return False


def _zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False

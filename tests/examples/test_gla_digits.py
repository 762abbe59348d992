"""The example that trains a classifier of handwritten digits."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from opmux import registry

pytest.importorskip("sklearn")


@pytest.fixture(scope="module")
def example():
    path = Path(__file__).parents[2] / "examples" / "gla_digits.py"
    spec = importlib.util.spec_from_file_location("gla_digits", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_attention_is_the_recurrence(example):
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 24, 3, 4)).astype(np.float32)
    log_gates = -rng.random((2, 24, 3, 4)).astype(np.float32)
    log_gates[:, 13] = -40.0  # whose inverse would not fit
    state = np.zeros((2, 3, 4, 4))
    want = np.empty((2, 24, 3, 4))
    for t in range(24):
        state = np.exp(log_gates[:, t, ..., None]) * state + k[:, t, ..., None] * v[:, t, :, None, :]
        want[:, t] = np.einsum("bhk,bhkv->bhv", q[:, t], state)
    for backend in ("interpret", "xla"):
        with registry.use(backend=backend):
            np.testing.assert_allclose(example.gated_linear_attention(q, k, v, log_gates), want, atol=1e-4)


def test_it_learns_at_once(example):
    lines = []
    result = example.train(seed=3, epochs=3, report=lines.append)
    assert result.accuracy >= 0.75
    assert result.backend in lines[0]
    assert sum(line.startswith("epoch") for line in lines) == 3


@pytest.mark.slow
def test_it_reaches_what_it_promises(example, capsys):
    assert example.main(["--seed", "1"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("test accuracy 9")

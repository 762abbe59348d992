"""`shard_map` with its default arguments, on eight devices that a subprocess pretends to have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from opmux import registry
from opmux.testing import (
    Subject,
    check_shard_map,
    conformance_params,
    expected_rejections,
    find_oracle,
    transform_cases,
)

DEVICES = 8
many = pytest.mark.skipif(jax.device_count() < DEVICES, reason=f"runs below, in a process with {DEVICES} devices")


def _first(subject, case):
    return case.name == transform_cases(subject.op)[0].name


@many
@pytest.mark.parametrize(("subject", "case"), conformance_params(registry.ops(), registry.backends(), select=_first))
def test_forced(subject, case):
    with expected_rejections():
        check_shard_map(subject, case)


@many
@pytest.mark.parametrize("op", registry.ops())
def test_automatic(op):
    """Where the first choice cannot run under the checks of `shard_map`, the next one does."""
    handle = registry.get(op)
    check_shard_map(Subject(handle.op, handle, find_oracle(op)), transform_cases(handle.op)[0])


@pytest.mark.skipif(jax.device_count() >= DEVICES, reason="this is the process with many devices")
def test_in_a_process_with_many_devices():
    path = Path(__file__)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rx", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=path.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout

"""Runs kernels of the backend in the GPU simulator, apart from the registry."""

import importlib
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from opmux.core import devices
from opmux.core.ops import builtin_ops
from opmux.core.simulation import SimulatorOptions
from opmux.plugins import mosaic_gpu
from opmux.testing.tolerances import assert_close, rtol

OPS = builtin_ops()
IMPLEMENTATIONS = {found.op: found for found in mosaic_gpu.opmux_implementations()}
H200, CPU = devices.device("h200"), devices.device("cpu")


class Runner:
    """One op of the backend: what it refuses, and its result in the simulator."""

    def __init__(self, name):
        self.op = OPS[name]
        self.implementation = IMPLEMENTATIONS[name]

    def refusals(self, *args, device=H200, **kwargs):
        return self.implementation.supports(self.op.request(args, kwargs), device)

    def __call__(self, *args, config=None, options=None, **kwargs):
        from opmux.plugins.mosaic_gpu.simulator import simulate

        call = self.op.call(args, kwargs)
        options = options or SimulatorOptions()
        return call.finish(
            simulate(
                self.implementation.load(), call.request, call.operands, self.config(call.request, config), options
            )
        )

    def config(self, request, changes):
        given = self.implementation.config_for(request, CPU)
        return self.implementation.config.model_validate({**given.model_dump(), **(changes or {})})

    def kernel(self, request, operands, changes):
        """The kernel itself, not simulated."""
        return self.implementation.load()(request, operands, self.config(request, changes))

    def check(self, *args, config=None, tolerance=None, **kwargs):
        """Asserts that the simulated result is the oracle's."""
        got = self(*args, config=config, **kwargs)
        oracle = getattr(importlib.import_module(f"opmux.testing.oracle.{self.op.name}"), self.op.name)
        want = np.asarray(oracle(*args, **kwargs))

        def reference():
            call = self.op.call(args, kwargs)
            return call.finish(self.op.reference(call.request, call.operands))

        declared = jax.eval_shape(reference)
        assert (got.shape, got.dtype) == (declared.shape, declared.dtype)
        longest = max((size for array in args for size in np.shape(array)), default=1)
        assert_close(got, want, tolerance or rtol(got.dtype, longest), self.op.name)


@pytest.fixture(scope="session")
def gpu():
    """`gpu("add")` is `add` on the simulated kernel."""
    return Runner


@pytest.fixture
def child(tmp_path):
    """Runs a program in a process of its own, which a hanging simulator cannot outlive; returns what it printed."""

    def run(code, limit=240):
        script = tmp_path / "child.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, str(script)], env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}, cwd=tmp_path,
            capture_output=True, text=True, timeout=limit,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run

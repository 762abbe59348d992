"""Runs a kernel of the backend in the TPU simulator, apart from the registry."""

import pytest

from opmux.core import devices
from opmux.core.ops import builtin_ops
from opmux.core.simulation import SimulatorOptions
from opmux.plugins import mosaic_tpu
from opmux.plugins.mosaic_tpu.simulator import simulate

OPS = builtin_ops()
IMPLEMENTATIONS = {found.op: found for found in mosaic_tpu.opmux_implementations()}
V6E = devices.device("tpu-v6e")


class Refused(Exception):
    """The backend does not take the call."""


class Runner:
    """Calls an op as a user does, on the simulated kernel."""

    def __init__(self, name):
        self.op = OPS[name]
        self.implementation = IMPLEMENTATIONS[name]

    def __call__(self, *args, config=None, options=None, **kwargs):
        call = self.op.call(args, kwargs)
        reasons = self.implementation.supports(call.request, V6E)
        if reasons:
            raise Refused(reasons)
        config = config or self.implementation.config_for(call.request, V6E)
        outputs = simulate(
            self.implementation.load(), call.request, call.operands, config, options or SimulatorOptions()
        )
        return call.finish(outputs)


@pytest.fixture
def run():
    """`run("add")` is `add` on the simulated kernel."""
    return Runner


@pytest.fixture
def refused():
    """What a runner raises for a call that the backend does not take."""
    return Refused

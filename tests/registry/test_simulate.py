"""Backends whose device is absent, in a simulator of it."""

import warnings

import fakes
import jax
import pytest
import simulator

from opmux import registry
from opmux.core.errors import ForcedBackendError, NoViableImplementationError, SettingError, SimulatedBackendWarning
from opmux.core.simulation import SimulatorOptions
from opmux.registry import policy

SIMULATED, NATIVE = 10.0, 1.0


@pytest.fixture(autouse=True)
def a_simulated_tpu():
    registry.register(
        fakes.plugin(
            "tpu",
            registry.Implementation("add", kernel="simulator:kernel", priority={"*": 9}),
            registry.Implementation("add_vjp", kernel="simulator:gradient"),
            platforms=("tpu",),
            simulator="simulator:simulate",
        )
    )
    registry.register(fakes.backend("plain", 2.0))


def test_a_forced_backend_runs_in_the_simulator_and_says_so_once():
    before = simulator.entered
    forced = registry.get("add", backend="tpu")
    with pytest.warns(SimulatedBackendWarning, match="backend 'tpu' runs in a simulator"):
        assert forced(0.0, 0.0) == SIMULATED
    assert jax.jit(lambda x: forced(x, x))(0.0) == SIMULATED  # a second warning would be an error
    with registry.use(backend="tpu"):
        assert registry.get("add")(0.0, y=0.0) == SIMULATED
    assert simulator.entered > before
    assert not simulator.inside
    decision = registry.get("add", backend="tpu").explain(0.0, 0.0)
    assert decision.simulated
    assert decision.candidate("tpu").simulated
    assert decision.backward.simulated
    assert "chosen    tpu: forced by call (simulated)" in str(decision)


@pytest.mark.filterwarnings("ignore::opmux.core.errors.SimulatedBackendWarning")
def test_options_reach_the_simulator_and_re_key_what_is_compiled():
    forced = registry.get("add", backend="tpu")
    forced(0.0, 0.0)
    assert simulator.seen == SimulatorOptions()
    eager = SimulatorOptions(dma="eager", seed=3)
    with registry.use(simulator=eager):
        forced(0.0, 0.0)
        assert simulator.seen == eager
    with pytest.raises(SettingError, match="simulator: got a dict; allowed: SimulatorOptions"):
        registry.use(simulator={"dma": "eager"})


def test_kernels_are_traced_under_one_policy_whether_copies_are_late_or_early():
    def traced(**given):
        with registry.use(**given):
            return policy.current().traced

    late, early = (traced(simulator=SimulatorOptions(dma=dma, seed=3)) for dma in ("on_wait", "eager"))
    assert late is early
    assert late.simulator == SimulatorOptions(seed=3)
    assert traced(simulator=SimulatorOptions(seed=4)) is not late
    assert traced(simulator=SimulatorOptions(dma="eager", seed=3), prefer=["plain"]) is not late
    assert policy.current().traced is policy.current()


@pytest.mark.filterwarnings("ignore::opmux.core.errors.SimulatedBackendWarning")
def test_the_backward_is_simulated_too():
    assert jax.grad(registry.get("add", backend="tpu"))(0.0, 0.0) == SIMULATED


def test_automatic_choice_never_simulates():
    assert registry.get("add")(0.0, 0.0) == 2
    for simulate in ("auto", "always"):
        with registry.use(simulate=simulate):
            assert registry.get("add")(0.0, 0.0) == 2
            (reason,) = registry.explain("add", 0.0, 0.0).candidate("tpu").reasons
            assert (reason.code, reason.detail) == ("platform", "runs on tpu, not on cpu")
            assert "OPMUX_BACKEND=tpu runs it in a simulator" in reason.hint
    registry.unregister("plain")
    with pytest.raises(NoViableImplementationError, match="in a simulator"):
        registry.get("add")(0.0, 0.0)


@pytest.mark.parametrize("how", ["environment", "scope", "configure"])
def test_never_is_an_error_that_says_what_is_missing(monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("OPMUX_SIMULATE", "never")
    if how == "configure":
        registry.configure(simulate="never")
    with registry.use(simulate="never" if how == "scope" else None):
        with pytest.raises(ForcedBackendError) as caught:
            registry.get("add", backend="tpu")(0.0, 0.0)
        assert "platform: runs on tpu, not on cpu, and OPMUX_SIMULATE=never" in " ".join(str(caught.value).split())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert registry.get("add")(0.0, 0.0) == 2


def test_a_scope_overrides_the_environment(monkeypatch):
    monkeypatch.setenv("OPMUX_SIMULATE", "never")
    with registry.use(simulate="auto"), pytest.warns(SimulatedBackendWarning):
        assert registry.get("add", backend="tpu")(0.0, 0.0) == SIMULATED


def test_always_simulates_where_the_device_exists(process_with):
    process_with("tpu-v6e")
    assert registry.get("add")(0.0, 0.0) == NATIVE
    assert registry.get("add", backend="tpu")(0.0, 0.0) == NATIVE
    with registry.use(simulate="always"):
        with pytest.warns(SimulatedBackendWarning):
            assert registry.get("add", backend="tpu")(0.0, 0.0) == SIMULATED
        assert registry.get("add")(0.0, 0.0) == NATIVE  # automatic choice never simulates


@pytest.mark.parametrize("simulate", ["auto", "always", "never"])
def test_a_backend_without_a_simulator_runs_at_home(process_with, simulate):
    process_with("h200")
    registry.register(fakes.backend("for_cuda", 3.0, info={"platforms": ("cuda",)}, priority={"*": 10}))
    with registry.use(simulate=simulate):
        assert registry.get("add")(0.0, 0.0) == 3
        assert registry.get("add", backend="for_cuda")(0.0, 0.0) == 3


@pytest.mark.parametrize("simulate", ["auto", "always", "never"])
def test_a_backend_without_a_simulator_runs_nowhere_else(simulate):
    registry.register(fakes.backend("for_cuda", 3.0, info={"platforms": ("cuda",)}))
    with registry.use(simulate=simulate), pytest.raises(ForcedBackendError) as caught:
        registry.get("add", backend="for_cuda")(0.0, 0.0)
    (reason,) = caught.value.decision.candidate("for_cuda").reasons
    assert (reason.detail, reason.hint) == ("runs on cuda, not on cpu", "")


def test_a_trace_for_several_platforms_says_nothing_of_a_branch_that_will_not_run(process_with):
    process_with("tpu-v6e", "cpu")
    add = registry.get("add", backend="tpu")
    text = jax.jit(add).trace(0.0, 0.0).lower(lowering_platforms=("tpu",)).as_text(debug_info=True)
    assert "opmux.add[tpu]" in text  # a warning would be an error


def test_a_value_that_means_nothing():
    with pytest.raises(SettingError, match=r"use\(simulate=\.\.\.\): got 'maybe'; allowed: auto, never, always"):
        registry.use(simulate="maybe")

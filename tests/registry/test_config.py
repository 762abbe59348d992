"""Configs of kernels: overrides, what is refused, and which field it was."""

import fakes
import jax
import jax.numpy as jnp
import pytest

from opmux import registry
from opmux.core.errors import ConfigError, ForcedBackendError, SettingError


class Other(registry.Config):
    stages: int = 2


def echo(request, operands, config):
    """A kernel whose result is its config."""
    return {"out": jnp.full(request["x"].shape, config.block, request["x"].dtype)}


def tuned(name, **kwargs):
    return fakes.plugin(name, registry.Implementation("add", kernel=echo, config=fakes.Blocks, **kwargs))


@pytest.fixture(autouse=True)
def backends():
    registry.register(tuned("tuned", priority={"*": 9}))
    registry.register(fakes.backend("plain", 1.0, config=Other))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("config", "result"), [(None, 64), ({"block": 8}, 8), ({}, 64), (fakes.Blocks(block=16), 16), (fakes.Blocks(), 64)]
)
def test_a_mapping_overrides_fields_and_an_instance_is_taken_as_it_is(config, result, jit):
    handle = registry.get("add", config=config)
    assert (jax.jit(handle) if jit else handle)(0.0, 0.0) == result
    assert handle.explain(0.0, 0.0).config == {"block": result}


def test_the_default_config_may_depend_on_request_and_device():
    def default_config(request, device):
        return fakes.Blocks(block=8 * (1 + request["x"].size) if device.name == "cpu" else 128)

    registry.register(tuned("adaptive", default_config=default_config, priority={"*": 10}))
    assert registry.get("add")(jnp.zeros(3), jnp.zeros(3))[0] == 32
    assert registry.get("add", device="h200").explain(0.0, 0.0).config == {"block": 128}


@pytest.mark.parametrize(
    ("config", "problems"),
    [
        ({"blok": 8}, ["field 'blok': got 8: Extra inputs are not permitted"]),
        ({"block": 7}, ["field 'block': got 7", "multiple of 8"]),
        ({"block": -8}, ["field 'block': got -8", "greater than 0"]),
        ({"block": "8"}, ["field 'block': got '8'", "integer"]),
        ({"block": 8.0}, ["field 'block': got 8.0"]),
        ({"block": True}, ["field 'block': got True"]),
        ({"block": 7, "blok": 1}, ["field 'block': got 7", "field 'blok': got 1"]),
        (Other(), ["got a Other; allowed: Blocks"]),
    ],
)
def test_what_the_schema_refuses_is_named(config, problems):
    with pytest.raises(ConfigError) as caught:
        registry.get("add", backend="tuned", config=config)(0.0, 0.0)
    for problem in ["config of 'add': tuned", *problems]:
        assert problem in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_equal_values_of_another_type_are_told_apart():
    assert registry.get("add", backend="tuned", config={"block": 8})(0.0, 0.0) == 8
    with pytest.raises(ConfigError, match=r"got 8\.0"):
        registry.get("add", backend="tuned", config={"block": 8.0})(0.0, 0.0)


@pytest.mark.parametrize("config", [{"stages": 3}, Other(stages=3)])
def test_automatic_choice_moves_on_with_the_reason(config):
    handle = registry.get("add", config=config)
    assert handle(0.0, 0.0) == 1
    (reason,) = handle.explain(0.0, 0.0).candidate("tuned").reasons
    assert (reason.code, reason.hint) == ("config", "schema: Blocks")


def test_a_config_that_nothing_takes_is_a_config_error():
    with pytest.raises(ConfigError, match=r"plain: field 'blok'.*tuned: field 'blok'"):
        registry.get("add", config={"blok": 1})(0.0, 0.0)


def test_a_config_does_not_hide_another_reason():
    registry.register(fakes.backend("other", 1.0, supports=fakes.rejects("dtype", "f32 is not bf16")))
    with pytest.raises(ForcedBackendError, match="dtype: f32 is not bf16"):
        registry.get("add", backend="other", config={"blok": 1})(0.0, 0.0)


@pytest.mark.parametrize(
    "default_config", [lambda request, device: Other(), lambda request, device: None, lambda request, device: 1 / 0]
)
def test_a_broken_default_config_is_the_plugins_fault(default_config):
    registry.register(tuned("broken", default_config=default_config, priority={"*": 10}))
    assert registry.get("add")(0.0, 0.0) == 64
    (reason,) = registry.explain("add", 0.0, 0.0).candidate("broken").reasons
    assert reason.code == "plugin-failed"


def test_a_default_config_may_say_that_nothing_fits():
    registry.register(tuned("strict", default_config=lambda r, d: fakes.Blocks(block=7), priority={"*": 10}))
    assert registry.get("add")(0.0, 0.0) == 64
    (reason,) = registry.explain("add", 0.0, 0.0).candidate("strict").reasons
    assert reason.code == "config"
    with pytest.raises(ForcedBackendError, match="field 'block': got 7"):
        registry.get("add", backend="strict")(0.0, 0.0)


@pytest.mark.parametrize(
    ("config", "problem"), [(3, "got a int"), ({1: 2}, "the field 1"), ({"block": [8]}, "hashable")]
)
def test_what_is_no_config_is_refused_at_get(config, problem):
    with pytest.raises(SettingError, match=problem):
        registry.get("add", config=config)


def test_the_config_is_for_the_forward_alone():
    registry.register(fakes.backend("both", 1.0, vjp=fakes.gradient(7.0), config=fakes.Blocks))
    assert jax.grad(registry.get("add", backend="both", config={"block": 8}))(0.0, 0.0) == 7


def test_configs_are_hashable_and_immutable():
    assert hash(fakes.Blocks(block=8)) == hash(fakes.Blocks(block=8))
    with pytest.raises(ValueError, match="frozen"):
        fakes.Blocks().block = 16

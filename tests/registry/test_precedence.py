"""call > scope > environment > configure > ranking."""

import itertools

import fakes
import jax
import pytest

from opmux import registry
from opmux.core.errors import ForcedBackendError

LAYERS = ("call", "scope", "environment", "configure")
MARKERS = {"call": 1.0, "scope": 2.0, "environment": 3.0, "configure": 4.0, "ranking": 5.0}


@pytest.fixture(autouse=True)
def one_backend_for_each_layer():
    for name, marker in MARKERS.items():
        registry.register(fakes.backend(name, marker, priority={"*": 9 if name == "ranking" else 0}))


def ask(monkeypatch, layers, spell=lambda name: name):
    """The result of `add` where each of the layers forces its own backend."""
    if "environment" in layers:
        monkeypatch.setenv("OPMUX_BACKEND", spell("environment"))
    if "configure" in layers:
        registry.configure(backend=spell("configure"))
    options = {"backend": spell("call")} if "call" in layers else {}
    scope = {"backend": spell("scope")} if "scope" in layers else {}
    with registry.use(**scope):
        handle = registry.get("add", **options)
        assert handle.explain(0.0, 0.0).forced_by == (layers[0] if layers else "")
        return float(handle(0.0, 0.0)), float(jax.jit(handle)(0.0, 0.0))


@pytest.mark.parametrize("spell", [lambda name: name, lambda name: f"add={name}", lambda name: f"add@cpu={name}"])
@pytest.mark.parametrize("layers", [(), *itertools.combinations(LAYERS, 1), *itertools.combinations(LAYERS, 2), LAYERS])
def test_E7_the_first_that_speaks_forces(monkeypatch, layers, spell):
    first = layers[0] if layers else "ranking"
    assert ask(monkeypatch, layers, spell) == (MARKERS[first],) * 2


@pytest.mark.parametrize("rule", ["matmul=call", "add@tpu=call", "matmul_vjp=call"])
def test_a_rule_for_something_else_does_not_speak(monkeypatch, rule):
    monkeypatch.setenv("OPMUX_BACKEND", "add=environment")
    with registry.use(backend=rule):
        assert registry.get("add")(0.0, 0.0) == MARKERS["environment"]


@pytest.mark.parametrize(("upper", "lower"), list(itertools.combinations(LAYERS, 2)))
def test_auto_ends_what_a_lower_layer_forces(monkeypatch, upper, lower):
    def spell(name):
        return "auto" if name == upper else name

    if lower == "environment":
        monkeypatch.setenv("OPMUX_BACKEND", lower)
    elif lower == "configure":
        registry.configure(backend=lower)
    options = {"backend": spell("call")} if upper == "call" else {}
    if upper == "environment":
        monkeypatch.setenv("OPMUX_BACKEND", spell(upper))
    with registry.use(**{"backend": spell("scope")} if "scope" in (upper, lower) else {}):
        handle = registry.get("add", **options)
        assert handle(0.0, 0.0) == MARKERS["ranking"]
        decision = handle.explain(0.0, 0.0)
    assert (decision.forced_by, decision.forced) == ("", ())
    assert decision.layers[0].source == upper


def test_auto_for_one_op_among_others(monkeypatch):
    monkeypatch.setenv("OPMUX_BACKEND", "add=auto;*=environment")
    assert registry.get("add")(0.0, 0.0) == MARKERS["ranking"]
    assert registry.explain("matmul", *[jax.ShapeDtypeStruct((2, 2), "float32")] * 2).forced == ("environment",)


def test_nested_scopes_override_and_come_back():
    add = registry.get("add")
    seen = [add(0.0, 0.0)]
    with registry.use(backend="scope"):
        seen.append(add(0.0, 0.0))
        with registry.use(backend={"matmul": "call"}):
            seen.append(add(0.0, 0.0))  # the inner one says nothing about add
            with registry.use(backend={"add": "call"}):
                seen.append(add(0.0, 0.0))
            seen.append(add(0.0, 0.0))
        seen.append(add(0.0, 0.0))
    seen.append(add(0.0, 0.0))
    assert [float(found) for found in seen] == [5, 2, 2, 1, 2, 2, 5]


def test_an_exception_leaves_the_scope():
    with pytest.raises(KeyError), registry.use(backend="scope"):
        raise KeyError
    assert registry.get("add")(0.0, 0.0) == MARKERS["ranking"]


def test_one_scope_object_enters_twice_and_again():
    scope = registry.use(backend="scope")
    with scope, scope, registry.use(backend="call"), scope:
        assert registry.get("add")(0.0, 0.0) == MARKERS["scope"]
    assert registry.get("add")(0.0, 0.0) == MARKERS["ranking"]
    with scope:
        assert registry.get("add")(0.0, 0.0) == MARKERS["scope"]


def test_configure_keeps_what_is_not_given_and_takes_back():
    registry.configure(backend="add=configure", prefer=["call"])
    registry.configure(simulate="never")
    assert registry.get("add")(0.0, 0.0) == MARKERS["configure"]
    registry.configure(backend="auto")
    assert registry.get("add")(0.0, 0.0) == MARKERS["call"]
    registry.configure(prefer=())
    assert registry.get("add")(0.0, 0.0) == MARKERS["ranking"]


def test_E5_F4_the_environment_is_read_at_the_call(monkeypatch):
    add = registry.get("add")
    seen = []
    for value in ("scope", None, "call", "scope", ""):
        monkeypatch.delenv("OPMUX_BACKEND", raising=False)
        if value is not None:
            monkeypatch.setenv("OPMUX_BACKEND", value)
        seen.append(float(add(0.0, 0.0)))
    assert seen == [2, 5, 1, 2, 5]


@pytest.mark.parametrize("layer", LAYERS)
def test_F9_F22_E6_a_forced_backend_never_falls_back(monkeypatch, layer):
    registry.register(fakes.backend("broken", 9, supports=fakes.rejects("shape", "wants 128", "pad it")))
    with pytest.raises(ForcedBackendError) as caught:
        ask_one(monkeypatch, layer, "broken")
    text = str(caught.value)
    assert f"{layer} forces broken" in text
    assert "shape: wants 128" in text
    assert "hint: pad it" in text
    assert "ranking" in text  # E6: who could have
    assert caught.value.decision.backend == ""


@pytest.mark.parametrize("layer", LAYERS)
def test_a_forced_list_is_tried_in_order(monkeypatch, layer):
    registry.register(fakes.backend("broken", 9, supports=fakes.rejects()))
    assert ask_one(monkeypatch, layer, "broken,scope,call") == MARKERS["scope"]


def ask_one(monkeypatch, layer, value):
    if layer == "environment":
        monkeypatch.setenv("OPMUX_BACKEND", value)
    if layer == "configure":
        registry.configure(backend=value)
    with registry.use(**{"backend": value} if layer == "scope" else {}):
        return float(registry.get("add", **{"backend": value} if layer == "call" else {})(0.0, 0.0))


def test_F7_the_force_reaches_ops_inside_ops(monkeypatch):
    """An op that calls another op resolves that one under the same policy."""

    def kernel(request, operands, config):
        return {"out": registry.get("add")(operands["x"], operands["x"])}

    op = fakes.power_op("outer")
    registry.register(fakes.plugin("composite", registry.Implementation("outer", kernel=kernel), ops=[op]))
    with registry.use(backend="outer=composite;add=call"):
        assert registry.get("outer")(1.0) == 3.0
        assert jax.jit(registry.get("outer"))(1.0) == 3.0
    assert registry.get("outer")(1.0) == 7.0


def test_disable_holds_over_every_layer(monkeypatch):
    monkeypatch.setenv("OPMUX_DISABLE", "ranking, scope")
    registry.configure(disable=["call"])
    assert registry.get("add")(0.0, 0.0) == MARKERS["configure"]
    with pytest.raises(ForcedBackendError, match="disabled: the plugin is disabled"):
        registry.get("add", backend="scope")(0.0, 0.0)

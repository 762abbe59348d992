"""Functions that users jitted themselves, and everything else that JAX caches."""

import os
import sys

import fakes
import jax
import jax.numpy as jnp
import pytest

from opmux import registry
from opmux.registry import policy


@pytest.fixture(autouse=True)
def two_backends():
    registry.register(fakes.backend("a", 1.0, priority={"*": 9}))
    registry.register(fakes.backend("b", 2.0))


class Traced:
    """A user's jitted function; counts how often JAX traced it."""

    def __init__(self, function=None):
        self.traces = 0

        def body(x):
            self.traces += 1
            return function(x) if function is not None else registry.get("add")(x, x)

        self.jitted = jax.jit(body)

    def __call__(self, x=0.0):
        return float(self.jitted(x))


def test_F29_J3_override_and_back_is_two_traces():
    f = Traced()
    seen = [f(), f()]
    with registry.use(backend="b"):
        seen += [f(), f()]
    seen += [f()]
    with registry.use(backend={"add": "b"}):  # another value of the policy, and a trace of its own
        seen += [f()]
    with registry.use(backend="b"):
        seen += [f()]
    assert seen == [1, 1, 2, 2, 1, 2, 2]
    assert f.traces == 3


def test_F29_exactly_two_traces_through_an_outer_jit():
    inner = Traced()
    outer = jax.jit(lambda x: inner.jitted(x) * 10)
    seen = [float(outer(0.0))]
    with registry.use(backend="b"):
        seen.append(float(outer(0.0)))
    seen.append(float(outer(0.0)))
    assert seen == [10, 20, 10]
    assert inner.traces == 2


def test_J6_an_equal_policy_traces_nothing(monkeypatch):
    f = Traced()
    f()
    with registry.use():
        f()
    with registry.use(backend="b"):
        f()
        with registry.use(backend="b"), registry.use():
            f()
    with registry.use(backend="*=b"):
        f()
    registry.configure(prefer=())
    monkeypatch.setenv("OPMUX_BACKEND", "")
    registry.get("add")
    f()
    assert f.traces == 2


def test_opmux_rekeys_nothing_until_somebody_asks():
    f = Traced(lambda x: x + 1)
    f()
    registry.get("add")(0.0, 0.0)
    registry.explain("add", 0.0, 0.0)
    f()
    assert f.traces == 1


def test_T15_F4_J2_an_environment_that_changes_reaches_jitted_functions_at_the_next_get(monkeypatch):
    f = Traced()
    seen = [f()]
    monkeypatch.setenv("OPMUX_BACKEND", "b")
    seen.append(f())  # compiled, so no code of opmux runs: nobody reads the variable
    registry.get("add")
    seen.append(f())
    monkeypatch.delenv("OPMUX_BACKEND")
    registry.get("add")
    seen.append(f())
    assert seen == [1, 1, 2, 1]
    assert f.traces == 2


def test_what_changes_inside_of_a_scope_reaches_jitted_functions_too(monkeypatch):
    f = Traced()
    with registry.use(prefer=["a"]):
        seen = [f()]
        with registry.use(simulate="never"):
            monkeypatch.setenv("OPMUX_BACKEND", "b")
            registry.get("add")
            seen.append(f())
            registry.configure(prefer=["b"])
            monkeypatch.setenv("OPMUX_BACKEND", "a")
            registry.get("add")
            seen.append(f())
            monkeypatch.setenv("OPMUX_BACKEND", "b")
            registry.get("add")
        seen.append(f())
        monkeypatch.delenv("OPMUX_BACKEND")
        registry.get("add")
        seen.append(f())
    registry.configure(prefer=["b"])
    seen.append(f())
    assert seen == [1, 2, 1, 2, 1, 2]


def test_an_explanation_inside_a_trace_is_part_of_it():
    f = Traced(lambda x: x + (10 if registry.explain("add", 0.0, 0.0).backend == "a" else 20))
    seen = [f()]
    registry.configure(backend="b")
    seen.append(f())
    with registry.use(backend="a"):
        seen.append(f())
    assert seen == [10, 20, 10]


def test_configure_and_plugins_rekey_jitted_functions():
    f = Traced()
    seen = [f()]
    registry.configure(backend="b")
    seen.append(f())
    registry.configure(backend="auto")
    seen.append(f())
    registry.register(fakes.backend("c", 3.0, priority={"*": 99}))
    seen.append(f())
    registry.unregister("c")
    seen.append(f())
    assert seen == [1, 2, 1, 3, 1]


@pytest.mark.parametrize("first", [None, "a"])
def test_T15_an_environment_that_changes_inside_a_trace_poisons_no_cache(monkeypatch, first):
    """The function is keyed by the old policy and half of it follows the new one: that key never comes back."""
    if first is not None:
        monkeypatch.setenv("OPMUX_BACKEND", first)
        registry.get("add")

    def body(x):
        once = registry.get("add")(x, x)
        if flip:
            os.environ["OPMUX_BACKEND"] = "b"
        return once * 10 + registry.get("add")(x, x)

    flip = True
    f = Traced(body)
    assert f() == 12
    flip = False
    assert f() == 22
    for value, expected in (("a", 11), ("b", 22)):
        monkeypatch.setenv("OPMUX_BACKEND", value)
        registry.get("add")
        assert f() == expected
    monkeypatch.delenv("OPMUX_BACKEND")
    registry.get("add")
    assert f() == 11


def test_a_scope_inside_a_jitted_function():
    def body(x):
        with registry.use(backend="b"):
            inner = registry.get("add")(x, x)
        return inner * 10 + registry.get("add")(x, x)

    f = Traced(body)
    assert f() == 21
    with registry.use(backend="a"):
        assert f() == 21
        with registry.use(backend="b"):
            assert f() == 22


def test_the_first_use_may_be_inside_a_trace(monkeypatch):
    monkeypatch.setenv("OPMUX_BACKEND", "b")
    f = Traced()
    assert (f(), f()) == (2, 2)
    monkeypatch.delenv("OPMUX_BACKEND")
    registry.get("add")
    assert f() == 1


@pytest.mark.parametrize("arguments", [(0.0, 0.0), (jnp.zeros(3), 0.0), (jnp.zeros((2, 1)), jnp.zeros(3))])
def test_a_warm_handle_traces_nothing(arguments):
    calls = []
    registry.register(fakes.backend("c", 3.0, calls=calls, priority={"*": 99}))
    add = registry.get("add")
    for _ in range(3):
        add(*arguments)
        registry.get("add")(*arguments)
    assert len(calls) == 1
    add(*arguments)
    add(arguments[0], y=arguments[1])
    add(x=arguments[0], y=arguments[1])
    assert len(calls) == 2  # by name is one more signature of the same body


def test_a_kernel_module_that_is_first_imported_under_a_trace_leaks_no_tracer():
    sys.modules.pop("computes_on_import", None)
    registry.register(fakes.plugin("late", registry.Implementation("add", "computes_on_import:add")))
    add = registry.get("add", backend="late")
    for size in range(3):
        assert jax.jit(add)(jnp.zeros(size), jnp.zeros(size)).tolist() == [1] * size
    assert isinstance(sys.modules["computes_on_import"].CONSTANT.tolist(), list)


def test_disable_jit():
    with jax.disable_jit():
        assert registry.get("add")(0.0, 0.0) == 1
        assert registry.get("add", backend="b")(0.0, 0.0) == 2
        with registry.use(backend="b"):
            assert jax.jit(lambda x: registry.get("add")(x, x))(0.0) == 2
            assert jax.grad(registry.get("add"))(0.0, 0.0) == 1
        assert jax.vmap(registry.get("add"))(jnp.zeros(2), jnp.zeros(2)).tolist() == [1, 1]


def test_default_device():
    other = jax.devices("cpu")[3]
    with jax.default_device(other):
        out = registry.get("add")(0.0, 0.0)
    assert out.devices() == {other}
    assert out == 1


@pytest.mark.parametrize("transform", ["vmap", "scan", "remat", "fori_loop", "cond", "jit(vmap(grad))"])
def test_scopes_reach_transformed_functions(transform):
    def f(x):
        return registry.get("add")(x, x)

    def run(x):
        if transform == "vmap":
            return jax.vmap(f)(x)[0]
        if transform == "scan":
            return jax.lax.scan(lambda carry, y: (f(y), None), x[0], x)[0]
        if transform == "remat":
            return jax.checkpoint(f)(x)[0]
        if transform == "fori_loop":
            return jax.lax.fori_loop(0, 1, lambda _, carry: f(carry), x[0])
        if transform == "cond":
            return jax.lax.cond(True, f, lambda x: x, x[0])
        return f(x[0]) + 0 * jax.jit(jax.vmap(jax.grad(f)))(x)[0]

    x = jnp.zeros(2)
    seen = [float(run(x)), float(jax.jit(run)(x))]
    with registry.use(backend="b"):
        seen += [float(run(x)), float(jax.jit(run)(x))]
    seen += [float(run(x)), float(jax.jit(run)(x))]
    assert seen == [1, 1, 2, 2, 1, 1]


def test_the_scope_name_of_the_kernel_is_in_the_program():
    text = jax.jit(registry.get("add")).lower(0.0, 0.0).as_text(debug_info=True)
    assert "opmux.add[a]" in text


def test_J13_export_round_trip():
    f = jax.jit(registry.get("add"))
    shape = jax.ShapeDtypeStruct((3,), "float32")
    exported = jax.export.export(f)(shape, shape)
    again = jax.export.deserialize(exported.serialize())
    assert again.call(jnp.zeros(3), jnp.ones(3)).tolist() == [2, 2, 2]
    with registry.use(device="h200"):
        assert jax.export.export(f, platforms=["cuda"])(shape, shape).platforms == ("cuda",)


def test_policies_are_interned():
    with registry.use(backend="b"):
        one = policy.current()
    with registry.use(backend="b"):
        assert policy.current() is one

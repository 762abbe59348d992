"""Which backend is chosen where nothing is forced, what its kernel may do, and what its plugin may do wrong."""

import itertools
import random

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux import registry
from opmux.core.errors import (
    ForcedBackendError,
    NoViableImplementationError,
    PluginError,
    PluginWarning,
    SlowPathWarning,
)


def order(decision):
    return [found.backend for found in decision.candidates if found.state in ("selected", "viable")]


def test_F13_the_order_is_total_and_the_same_whatever_was_registered_first(process_with, entry_points):
    process_with("h200")
    made = [
        fakes.backend("narrow", 1, priority={"h200": 5, "*": 0}),
        fakes.backend("platform", 1, priority={"cuda": 5}),
        fakes.backend("wide", 1, priority={"*": 5}),
        fakes.backend("a_first", 1),
        fakes.backend("b_second", 1),
        fakes.backend("low", 1, priority={"cuda": -1}),
        fakes.backend("high", 1, priority={"h200": 6}),
        fakes.backend("elsewhere", 1, priority={"tpu": 99}),
    ]
    expected = ["high", "narrow", "platform", "wide", "a_first", "b_second", "elsewhere", "low"]
    for seed in range(4):
        random.Random(seed).shuffle(made)
        entry_points(*(fakes.Point(plugin.opmux_backend().name, plugin) for plugin in made))
        assert order(registry.get("add").explain(0.0, 0.0)) == expected


def test_a_built_in_goes_before_a_third_party_of_the_same_priority(entry_points):
    entry_points(
        fakes.Point("a", fakes.backend("a", 1), dist="acme"), fakes.Point("z", fakes.backend("z", 2), dist="opmux")
    )
    decision = registry.explain("add", 0.0, 0.0)
    assert order(decision) == ["z", "a"]
    assert decision.reason == "built in, at an equal priority"


@pytest.mark.parametrize(
    ("plugins", "preferred", "reason"),
    [
        ([("a", {"*": 2}), ("b", {"*": 1})], (), "highest priority on this device, 2 against 1 of b"),
        ([("a", {"*": 2}), ("b", {"*": 3})], ("a",), "preferred"),
        ([("a", {"cpu": 2}), ("b", {"*": 2})], (), "its priority names this device more narrowly"),
        ([("a", {}), ("b", {})], (), "first by name, at an equal priority"),
        ([("a", {})], (), "the only viable backend"),
    ],
)
def test_the_decision_says_why(plugins, preferred, reason):
    for name, priority in plugins:
        registry.register(fakes.backend(name, 1, priority=priority))
    with registry.use(prefer=preferred):
        decision = registry.explain("add", 0.0, 0.0)
    assert (decision.backend, decision.reason) == ("a", reason)


def test_a_priority_may_depend_on_the_request():
    def small(request, device):
        assert device.platform == "cpu"
        return 7 if request["x"].size < 4 else None

    registry.register(fakes.backend("picky", 1, priority={"*": 2}, priority_for=small))
    registry.register(fakes.backend("steady", 1, priority={"*": 3}))
    few, many = (registry.explain("add", np.zeros(n), 0.0) for n in (3, 4))
    assert (few.backend, few.reason) == ("picky", "highest priority for this request, 7 against 3 of steady")
    assert (many.backend, many.reason) == ("steady", "highest priority on this device, 3 against 2 of picky")


def test_a_priority_that_raises_is_the_plugins_failure():
    def broken(request, device):
        raise KeyError("block_q")

    registry.register(fakes.backend("bad", 1, priority_for=broken))
    registry.register(fakes.backend("good", 1))
    decision = registry.explain("add", 0.0, 0.0)
    (found,) = (candidate for candidate in decision.candidates if candidate.backend == "bad")
    assert (decision.backend, found.state) == ("good", "failed")
    assert "priority for 'add' raised KeyError" in found.reasons[0].detail


def test_prefer_lists_of_all_layers_go_one_after_another():
    for name in "abcde":
        registry.register(fakes.backend(name, 1))
    registry.configure(prefer=("d", "e"))
    with registry.use(prefer=["b"]), registry.use(prefer=["c", "b"]):
        assert order(registry.explain("add", 0.0, 0.0)) == ["c", "b", "d", "e", "a"]


def test_prefer_does_not_force():
    registry.register(fakes.backend("a", 1, supports=fakes.rejects()))
    registry.register(fakes.backend("b", 2))
    with registry.use(prefer=["a"]):
        assert registry.get("add")(0.0, 0.0) == 2


def test_the_rank_hook_reorders_and_is_asked_once_a_request():
    asked = []

    def opmux_rank(op, request, candidates):
        asked.append((op, tuple(candidates)))
        return ["c", "no such backend", "b", "c"]

    for name in "abc":
        registry.register(fakes.backend(name, ord(name)))
    registry.register(fakes.plugin("ranker", rank=opmux_rank))
    add = registry.get("add")
    for _ in range(3):
        assert add(0.0, 0.0) == ord("c")
    assert asked == [("add", ("a", "b", "c"))]
    decision = add.explain(0.0, 0.0)
    assert order(decision) == ["c", "b", "a"]
    assert decision.reason == "ranked first by a plugin's opmux_rank hook"
    with registry.use(prefer=["a"]):
        assert order(add.explain(0.0, 0.0)) == ["a", "c", "b"]


def test_the_first_rank_hook_with_an_opinion_counts_and_may_take_fewer_arguments():
    for name in "abc":
        registry.register(fakes.backend(name, 1))
    registry.register(fakes.plugin("r1", rank=lambda op: None))
    registry.register(fakes.plugin("r2", rank=lambda candidates: list(candidates)[::-1]))
    registry.register(fakes.plugin("r3", rank=lambda: ["b"]))
    assert order(registry.explain("add", 0.0, 0.0)) == ["c", "b", "a"]


@pytest.mark.parametrize("opinion", ["b", 3, {"b": 1}, ZeroDivisionError("nope")])
def test_a_broken_rank_hook_is_named_and_left_out(monkeypatch, opinion):
    def opmux_rank():
        if isinstance(opinion, Exception):
            raise opinion
        return opinion

    for name in "ab":
        registry.register(fakes.backend(name, ord(name)))
    registry.register(fakes.plugin("ranker", rank=opmux_rank))
    with pytest.warns(PluginWarning, match="'ranker': opmux_rank raised"):
        assert registry.get("add")(0.0, 0.0) == ord("a")
    monkeypatch.setenv("OPMUX_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="'ranker': opmux_rank"):
        registry.get("add")(0.0, 0.0)


def test_S5_automatic_choice_moves_on_and_keeps_every_reason():
    def picky(request, device):
        found = []
        if request["x"].dtype != jnp.bfloat16:
            found.append(registry.Rejection("dtype", f"{request['x'].dtype} is not bfloat16"))
        if request["x"].size % 128:
            found.append(registry.Rejection("shape", f"{request['x'].size} is no multiple of 128", "pad it"))
        return found

    registry.register(fakes.backend("fast", 1, supports=picky, priority={"*": 9}))
    registry.register(fakes.backend("slow", 2))
    assert registry.get("add")(0.0, 0.0) == 2
    assert registry.get("add")(jnp.zeros(128, jnp.bfloat16), jnp.zeros(128, jnp.bfloat16))[0] == 1
    found = registry.explain("add", 0.0, 0.0).candidate("fast")
    assert [(reason.code, reason.hint) for reason in found.reasons] == [("dtype", ""), ("shape", "pad it")]


def test_F26_F28_S7_when_all_fail_there_is_one_line_for_each():
    registry.register(fakes.backend("a", 1, supports=fakes.rejects("dtype", "f32")))
    registry.register(fakes.backend("b", 1, supports=fakes.rejects("shape", "odd")))
    registry.register(fakes.plugin("c", registry.Implementation("matmul", kernel="fakes:power")))
    with pytest.raises(NoViableImplementationError) as caught:
        registry.get("add")(0.0, 0.0)
    lines = str(caught.value).splitlines()
    assert [line for line in lines if "dtype: f32" in line]
    assert [line for line in lines if "shape: odd" in line]
    assert [found.backend for found in caught.value.decision.candidates] == ["a", "b"]


def test_no_backend_at_all_says_so():
    with pytest.raises(NoViableImplementationError, match="no backend has this op"):
        registry.get("add")(0.0, 0.0)


def test_E6_a_backend_without_the_op_is_named_with_what_it_has():
    registry.register(fakes.backend("a", 1))
    with pytest.raises(ForcedBackendError, match="no-implementation: it has no 'matmul'; it has add"):
        registry.get("matmul", backend="a")(jnp.ones((2, 2)), jnp.ones((2, 2)))


@pytest.mark.parametrize("error", [NotImplementedError, ImportError, TypeError, ValueError, ArithmeticError])
@pytest.mark.parametrize("jit", [False, True])
def test_F11_S7_what_a_kernel_raises_is_the_users_to_see(error, jit):
    calls, raised = [], error("from the kernel")

    def broken(request, operands, config):
        raise raised

    registry.register(fakes.plugin("first", registry.Implementation("add", kernel=broken, priority={"*": 9})))
    registry.register(fakes.backend("second", 1, calls=calls))
    handle = registry.get("add")
    for _ in range(2):
        with pytest.raises(error) as caught:
            (jax.jit(handle) if jit else handle)(0.0, 0.0)
        assert caught.value is raised
    assert calls == []


def test_F12_a_kernel_that_cannot_be_imported_is_not_passed_over():
    registry.register(
        fakes.plugin("first", registry.Implementation("add", kernel="no_such_module:kernel", priority={"*": 9}))
    )
    registry.register(fakes.backend("second", 1))
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.get("add")(0.0, 0.0)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda x: {}, "left out 'out', which was wanted; it returned: nothing"),
        (lambda x: {"output": x}, "left out 'out', which was wanted; it returned: output"),
        (lambda x: x, "not a mapping"),
        (lambda x: {"out": x.astype(jnp.float16)}, r"returned 'out' as f16\[3\]; the op says f32\[3\]"),
        (lambda x: {"out": x[:2]}, r"returned 'out' as f32\[2\]; the op says f32\[3\]"),
        (lambda x: {"out": 1.0}, "returned 'out' as float"),
    ],
)
def test_a_kernel_that_breaks_its_word_is_named(returned, problem):
    registry.register(
        fakes.plugin("bad", registry.Implementation("add", kernel=lambda request, given, config: returned(given["x"])))
    )
    with pytest.raises(PluginError, match=problem) as caught:
        registry.get("add")(jnp.ones(3), jnp.ones(3))
    assert "backend 'bad': its kernel of 'add'" in str(caught.value)


@pytest.mark.parametrize("answer", [None, True, ["dtype"], ZeroDivisionError("division")])
def test_F12_F18_a_broken_predicate_is_kept_as_a_reason(monkeypatch, answer):
    def supports(request, device):
        if isinstance(answer, Exception):
            raise answer
        return answer

    registry.register(fakes.backend("bad", 1, supports=supports, priority={"*": 9}))
    registry.register(fakes.backend("good", 2))
    assert registry.get("add")(0.0, 0.0) == 2
    found = registry.explain("add", 0.0, 0.0).candidate("bad")
    assert (found.state, found.reasons[0].code) == ("failed", "plugin-failed")
    assert "its predicate, config or priority for 'add' raised" in found.reasons[0].detail
    with pytest.raises(ForcedBackendError, match=r"its predicate, config or priority for 'add'\s+raised"):
        registry.get("add", backend="bad")(0.0, 0.0)
    monkeypatch.setenv("OPMUX_STRICT_PLUGINS", "1")
    with pytest.raises(PluginError, match="plugin 'bad'"):
        registry.get("add")(0.0, 0.0)


def test_a_predicate_may_be_a_generator():
    def supports(request, device):
        yield registry.Rejection("dtype", "no")

    registry.register(fakes.backend("a", 1, supports=supports))
    registry.register(fakes.backend("b", 2))
    assert registry.get("add")(0.0, 0.0) == 2


def test_errors_that_are_kept_do_not_gather_tracebacks():
    registry.register(fakes.backend("a", 1, supports=fakes.rejects()))
    found = []
    for _ in range(3):
        with pytest.raises(NoViableImplementationError) as caught:
            registry.get("add")(0.0, 0.0)
        found.append(caught.value)
    lengths = {len(list(itertools.takewhile(bool, iterate(error.__traceback__)))) for error in found}
    assert len({id(error) for error in found}) == 3
    assert len(lengths) == 1


def iterate(frame):
    while frame is not None:
        yield frame
        frame = frame.tb_next


SLOW = {"tier": "reference"}


def test_F9_F10_F12_F17_a_slow_choice_on_an_accelerator_warns_once(process_with):
    process_with("h200", "cpu")
    registry.register(fakes.backend("fast", 1, supports=fakes.rejects("capability", "sm80 only"), priority={"*": 9}))
    registry.register(fakes.backend("plain", 2, info=SLOW))
    add = jax.jit(registry.get("add"))
    with pytest.warns(SlowPathWarning) as caught:
        assert [add(jnp.zeros(size), jnp.zeros(size)).shape for size in range(4)]
    assert len(caught) == 1
    assert "add runs on h200 by backend 'plain' (reference), because fast: capability: sm80 only" in str(
        caught[0].message
    )


def test_F12_the_slow_choice_quotes_a_plugin_that_failed(process_with, entry_points):
    process_with("h200")
    entry_points(
        fakes.Point("acme", ImportError("libcuda.so.1")), fakes.Point("plain", fakes.backend("plain", 2, info=SLOW))
    )
    with (
        pytest.warns(SlowPathWarning, match=r"acme: plugin-failed: ImportError: libcuda\.so\.1"),
        pytest.warns(PluginWarning),
    ):
        registry.get("add")(0.0, 0.0)


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_F9_no_slow_warning_on_a_cpu_or_where_it_was_forced(process_with, device):
    process_with(device)
    registry.register(fakes.backend("fast", 1, supports=fakes.rejects()))
    registry.register(fakes.backend("plain", 2, info=SLOW))
    with registry.use(backend="plain" if device == "h200" else "auto"):
        assert registry.get("add")(0.0, 0.0) == 2  # a warning would be an error

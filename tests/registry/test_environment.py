"""The grammar of OPMUX_BACKEND, and the variables beside it."""

import pickle

import fakes
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from opmux import registry
from opmux.core.errors import (
    EnvSyntaxError,
    OpmuxError,
    PluginWarning,
    SettingError,
    UnknownBackendError,
    UnknownOpError,
)
from opmux.registry import environment
from opmux.registry.environment import Rule, parse_rules

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True).filter(lambda name: name != "auto")
targets = st.tuples(st.one_of(st.just("*"), names), st.sampled_from(("", *environment.PLATFORMS)))
backends = st.one_of(st.just(("auto",)), st.lists(names, min_size=1, max_size=3, unique=True).map(tuple))
spaces = st.sampled_from(("", " ", "  "))


@given(st.dictionaries(targets, backends, max_size=4), spaces)
def test_what_is_written_is_what_is_read(entries, space):
    text = ";".join(
        f"{space}{op}{'@' * bool(platform)}{platform}{space}={space}{f',{space}'.join(found)}"
        for (op, platform), found in entries.items()
    )
    rules = parse_rules(text)
    assert {(rule.op, rule.platform): rule.backends for rule in rules.rules} == entries
    assert parse_rules(str(rules)) == rules


@given(st.text(alphabet="ab*@=;,. -_1é\tautocuda", max_size=24))
@example("=")
@example("a=")
@example("@=a")
@example("a,,b")
@example("*@gpu=auto,a")
def test_any_text_parses_or_is_pointed_at(text):
    found, rules = None, parse_rules("")
    try:
        rules = parse_rules(text)
    except EnvSyntaxError as error:
        found = pickle.loads(pickle.dumps(error))
    assert parse_rules(str(rules)) == rules
    if found is not None:
        assert 1 <= found.column <= len(text) + 1
        assert f"column {found.column}" in str(found)


@pytest.mark.parametrize(
    ("text", "column", "problem"),
    [
        ("=xla", 1, "expected an op name"),
        ("add=", 5, "expected a backend name"),
        ("add=xla=b", 8, "a second '='"),
        ("add=xla,", 9, "expected a backend name"),
        ("add@mars=xla", 5, "unknown platform 'mars'"),
        ("add@ tqu=xla", 6, "did you mean 'tpu'?; known: cpu, cuda"),
        ("add=x!a", 6, "'!' cannot stand in a backend name"),
        ("1=xla", 1, "'1' cannot stand in an op name"),
        ("xla;add=a,a", 9, "named twice"),
        ("add=auto,xla", 5, "stands alone"),
        ("xla;*=a", 5, "a second entry for *"),
    ],
)
def test_errors_point_at_the_column(text, column, problem):
    with pytest.raises(EnvSyntaxError) as caught:
        parse_rules(text)
    assert caught.value.column == column
    assert problem in str(caught.value)
    shown = str(caught.value).splitlines()
    assert shown[1] == f"  {text}"
    assert shown[2].index("^") - 2 == column - 1


def test_the_narrowest_rule_speaks():
    rules = parse_rules("*=a;*@cuda=b;add=c;add@cuda=d;add@gpu=e;add_vjp=f;mul@gpu=g")
    found = {
        (op, platform): rule.backends[0]
        for op in ("add", "add_vjp", "mul", "mul_vjp")
        for platform in ("cpu", "cuda", "rocm")
        if (rule := rules.lookup(op, platform))
    }
    assert found == {
        ("add", "cpu"): "c", ("add", "cuda"): "d", ("add", "rocm"): "e",
        ("add_vjp", "cpu"): "f", ("add_vjp", "cuda"): "f", ("add_vjp", "rocm"): "f",
        ("mul", "cpu"): "a", ("mul", "cuda"): "g", ("mul", "rocm"): "g",
        ("mul_vjp", "cpu"): "a", ("mul_vjp", "cuda"): "g", ("mul_vjp", "rocm"): "g",
    }  # fmt: skip


def test_F6_S2_gpu_means_the_vendor_that_is_there():
    rule = Rule("add", "gpu", ("a",))
    for platform in ("cuda", "rocm"):
        assert parse_rules("add@gpu=a").lookup("add", platform) == rule
    assert parse_rules("add@gpu=a").lookup("add", "tpu") is None


@pytest.mark.parametrize("text", ["", "  ", ";", " ; "])
def test_empty_means_unset(monkeypatch, text):
    registry.register(fakes.backend("a", 1))
    monkeypatch.setenv("OPMUX_BACKEND", text)
    assert registry.get("add")(0.0, 0.0) == 1
    assert registry.explain("add", 0.0, 0.0).forced == ()


def test_F2_E2_S1_a_name_that_means_nothing_is_an_error_each_time(monkeypatch):
    registry.register(fakes.backend("mosaic_gpu", 1))
    handle = registry.get("add")
    monkeypatch.setenv("OPMUX_BACKEND", "mosiac_gpu")
    for _ in range(2):
        for call in (lambda: handle(0.0, 0.0), lambda: registry.get("add"), lambda: registry.use()):
            with pytest.raises(UnknownBackendError, match=r"'mosiac_gpu' in OPMUX_BACKEND; did you mean 'mosaic_gpu'"):
                call()
    monkeypatch.setenv("OPMUX_BACKEND", "atention=mosaic_gpu")
    with pytest.raises(UnknownOpError, match="did you mean 'attention'"):
        registry.get("add")
    monkeypatch.delenv("OPMUX_BACKEND")
    assert handle(0.0, 0.0) == 1


def test_F19_P7_a_missing_name_lists_what_failed_to_load(monkeypatch, entry_points):
    entry_points(fakes.Point("acme", ImportError("libacme.so.1 missing")))
    monkeypatch.setenv("OPMUX_BACKEND", "acmee")
    with pytest.warns(UserWarning, match=r"libacme\.so\.1"), pytest.raises(UnknownBackendError) as caught:
        registry.get("add")
    assert "did you mean 'acme'" in str(caught.value)
    assert "failed to load: acme: ImportError: libacme.so.1 missing" in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("OPMUX_SIMULATE", "sometimes", "auto, never, always"),
        ("OPMUX_STRICT_PLUGINS", "yes please", "1, true, 0, false"),
        ("OPMUX_DISABLE", "a,b!", "cannot stand in a plugin name"),
    ],
)
def test_E2_other_variables_say_what_is_allowed(monkeypatch, variable, value, allowed):
    registry.register(fakes.backend("a", 1))
    monkeypatch.setenv(variable, value)
    for _ in range(2):
        with pytest.raises(SettingError, match=allowed) as caught:
            registry.get("add")(0.0, 0.0)
        assert variable in str(caught.value)
        assert isinstance(caught.value, OpmuxError | ValueError)


def test_S1_a_plugin_to_disable_that_nobody_has_is_said_once(monkeypatch):
    registry.register(fakes.backend("acme", 1))
    monkeypatch.setenv("OPMUX_DISABLE", "acne")
    with pytest.warns(PluginWarning, match="no plugin is named 'acne'; did you mean 'acme'"):
        assert registry.get("add")(0.0, 0.0) == 1
    monkeypatch.setenv("OPMUX_DISABLE", "acne,")
    assert registry.get("add")(0.0, 0.0) == 1


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3, "got a int"),
        ({"add": 3}, "'add': got 3"),
        ({"add": ["xla", 3]}, "'add'"),
        (["xla"], "got a list"),
        ({"add=b": "xla"}, "a second '='"),
    ],
)
def test_a_backend_argument_of_another_type_is_refused(value, problem):
    with pytest.raises(SettingError, match=problem):
        registry.use(backend=value)


def test_F3_E1_the_decision_says_where_a_setting_comes_from(monkeypatch):
    registry.register(fakes.backend("a", 1))
    assert registry.explain("add", 0.0, 0.0).forced_by == ""
    monkeypatch.setenv("OPMUX_BACKEND", "add=a")
    decision = registry.explain("add", 0.0, 0.0)
    assert decision.forced_by == "environment"
    assert 'environment: backend="add=a"' in str(decision)


def test_layers_show_only_what_bears_on_the_op(monkeypatch):
    registry.register(fakes.backend("a", 1))
    monkeypatch.setenv("OPMUX_BACKEND", "matmul=a;add@tpu=a")
    assert registry.explain("add", 0.0, 0.0).layers == ()

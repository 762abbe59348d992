"""Finding, importing and checking plugins; what becomes of those that fail."""

import importlib.metadata
import pickle
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import fakes
import pytest

from opmux import registry
from opmux.core.errors import (
    ForcedBackendError,
    OpmuxError,
    PluginConflictError,
    PluginError,
    PluginLoadError,
    PluginValidationError,
    PluginWarning,
)
from opmux.core.implementation import BackendInfo, Implementation
from opmux.registry import hookimpl, tables
from opmux.registry.loader import Loader

GOOD = fakes.backend("good", 1)


def names():
    return list(registry.backends())


@pytest.mark.parametrize("error", [ImportError("no libfoo"), SystemExit(3), OSError("disk"), SyntaxError("bad")])
def test_F18_P1_P2_a_plugin_that_cannot_be_imported_leaves_the_others(entry_points, error):
    point = fakes.Point("bad", error, dist="Acme_Kernels", version="0.3")
    entry_points(point, fakes.Point("good", GOOD))
    with pytest.warns(PluginWarning, match="bad") as caught:
        assert (registry.get("add")(0.0, 0.0), names()) == (1, ["good"])
    assert (len(caught), point.times) == (1, 1)
    (failure,) = registry.failures()
    assert (failure.name, failure.stage, failure.found.dist, failure.found.version) == (
        "bad", "import", "acme-kernels", "0.3",
    )  # fmt: skip
    assert failure.reason == f"{type(error).__name__}: {error}"
    assert type(error).__name__ in failure.traceback
    assert "bad.plugin (acme-kernels 0.3)" in str(failure)
    with pytest.raises(ForcedBackendError, match=str(error)) as forced:
        registry.get("add", backend="bad")(0.0, 0.0)
    assert forced.value.__cause__ is error  # P2: with the original cause
    found = registry.explain("add", 0.0, 0.0).candidate("bad")
    assert (found.state, found.reasons[0].code) == ("failed", "plugin-failed")


def test_F18_an_interrupt_passes(entry_points):
    point = fakes.Point("bad", KeyboardInterrupt())
    entry_points(point)
    with pytest.raises(KeyboardInterrupt):
        registry.get("add")(0.0, 0.0)
    point.loads = fakes.backend("bad", 4)
    assert registry.get("add")(0.0, 0.0) == 4  # nothing was remembered of the interrupted attempt


def test_P1_strict_raises_what_was_isolated(monkeypatch, entry_points):
    cause = ImportError("no libfoo")
    entry_points(fakes.Point("bad", cause), fakes.Point("good", GOOD))
    monkeypatch.setenv("OPMUX_STRICT_PLUGINS", "1")
    with pytest.raises(PluginLoadError, match="bad") as caught:
        registry.get("add")(0.0, 0.0)
    assert caught.value.__cause__ is cause
    assert registry.get("add", backend="good")(0.0, 0.0) == 1  # which asks no other


def broken(**hooks):
    made = fakes.Plugin()
    for name, hook in {"opmux_backend": lambda: BackendInfo("bad"), **hooks}.items():
        if hook is not None:
            setattr(made, name, hookimpl(hook))
    return made


def raises(error):
    def hook():
        raise error

    return hook


def gives(*implementations):
    return {"opmux_implementations": lambda: list(implementations)}


MALFORMED = {
    "no hooks": (fakes.Plugin(), "has no hooks"),
    "a module without hooks": (pickle, "has no hooks"),
    "misspelt": (broken(opmux_implementation=lambda: ()), "opmux_implementation"),
    "unknown argument": (broken(opmux_ops=lambda device: []), "device"),
    "info of another type": (broken(opmux_backend=lambda: "bad"), "opmux_backend gave a str, not a BackendInfo"),
    "info None": (broken(opmux_backend=lambda: None), "opmux_backend gave a NoneType"),
    "another name": (broken(opmux_backend=lambda: BackendInfo("other")), "says its name is 'other'"),
    "api version": (
        broken(opmux_backend=lambda: BackendInfo("bad", api_version=(9, 0))), r"plugin interface \(9, 0\), this is \(1",
    ),
    "api version as text": (broken(opmux_backend=lambda: BackendInfo("bad", api_version="1.0")), "interface 1.0"),
    "platforms as text": (broken(opmux_backend=lambda: BackendInfo("bad", platforms="cuda")), "platforms: got 'cuda'"),
    "platform gpu": (broken(opmux_backend=lambda: BackendInfo("bad", platforms=("gpu",))), "cpu, cuda, rocm, tpu"),
    "tier": (broken(opmux_backend=lambda: BackendInfo("bad", tier="fast")), "tier: got 'fast'"),
    "simulator": (broken(opmux_backend=lambda: BackendInfo("bad", simulator="sim")), "'sim' is no 'package.module:"),
    "a hook raises": (broken(opmux_implementations=raises(KeyError("x"))), "a hook raised KeyError: 'x'"),
    "a hook exits": (broken(opmux_implementations=raises(SystemExit(2))), "a hook raised SystemExit: 2"),
    "implementations None": (broken(opmux_implementations=lambda: None), "gave a NoneType, not a list of Impl"),
    "implementations of another type": (broken(**gives("add")), "gave a str, not a Implementation"),
    "without info": (broken(opmux_backend=None, **gives(Implementation("add", "a:b"))), "no opmux_backend hook"),
    "twice": (broken(**gives(Implementation("add", "a:b"), Implementation("add", "a:c"))), "registers 'add' twice"),
    "kernel target": (broken(**gives(Implementation("add", "a.b"))), "kernel 'a.b' of 'add'"),
    "kernel of another type": (broken(**gives(Implementation("add", 3))), "kernel 3 of 'add'"),
    "config": (broken(**gives(Implementation("add", "a:b", config=dict))), "config of 'add'"),
    "priority": (broken(**gives(Implementation("add", "a:b", priority={"*": "high"}))), "priority of 'add'"),
    "supports": (broken(**gives(Implementation("add", "a:b", supports=True))), "supports of 'add'"),
    "ops of another type": (broken(opmux_ops=lambda: ["add"]), "gave a str, not a Op"),
    "op name": (broken(opmux_ops=lambda: [fakes.power_op("a_vjp")]), "op name 'a_vjp'"),
    "op of opmux": (broken(opmux_ops=lambda: [fakes.power_op("add")]), "'add', which 'opmux' has already"),
}  # fmt: skip


@pytest.mark.parametrize("which", MALFORMED)
def test_P1_what_is_malformed_is_refused_and_rolled_back(entry_points, which):
    plugin, problem = MALFORMED[which]
    loader = entry_points(fakes.Point("bad", plugin), fakes.Point("good", GOOD))
    with pytest.warns(PluginWarning, match="bad"):
        assert names() == ["good"]
    (failure,) = registry.failures()
    assert failure.stage == "validate"
    assert failure.error is not None
    assert isinstance(failure.error, PluginError)
    assert __import__("re").search(problem, str(failure.error)), str(failure.error)
    assert [name for name, _ in loader._manager.list_name_plugin()] == ["good"]
    assert registry.get("add")(0.0, 0.0) == 1
    # The same by hand: nothing of it is kept, so the repaired one can take its name.
    registry.unregister("bad")
    with pytest.raises(PluginError):
        registry.register(plugin, "bad")
    registry.register(fakes.backend("bad", 2, priority={"*": 9}))
    assert registry.get("add")(0.0, 0.0) == 2


@pytest.mark.parametrize("name", ["auto", "reference", "a b", "", "1a", "a,b"])
def test_a_name_that_the_environment_could_not_say_is_refused(name):
    with pytest.raises(PluginValidationError, match="name"):
        registry.register(fakes.backend(name, 1))


def test_a_half_registered_plugin_is_rolled_back_by_an_interrupt_too():
    plugin = broken(opmux_implementations=raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        registry.register(plugin)
    registry.register(fakes.backend("bad", 2))
    assert registry.get("add")(0.0, 0.0) == 2


def test_two_plugins_cannot_be_one_object():
    registry.register(GOOD)
    with pytest.raises(PluginConflictError, match="under the name 'good'"):
        registry.register(GOOD, "better")
    with pytest.raises(PluginConflictError, match="'good' exists already"):
        registry.register(fakes.backend("good", 2))


def test_two_plugins_cannot_add_one_op():
    registry.register(fakes.plugin("one", ops=[fakes.power_op()]))
    with pytest.raises(PluginConflictError, match="'power', which 'one' has already"):
        registry.register(fakes.plugin("two", ops=[fakes.power_op()]))


@pytest.mark.parametrize("dists", [("acme", "acme"), ("Acme_Kernels", "acme.kernels"), ("acme", "acme-nightly")])
def test_F25_P3_the_same_entry_point_twice_is_one(entry_points, dists):
    """An editable install, lib64 beside lib, metadata that an upgrade left behind."""
    first, second = (fakes.Point("good", GOOD, dist=dist, version=v) for dist, v in zip(dists, "12", strict=True))
    entry_points(first, second)
    assert names() == ["good"]
    assert registry.failures() == []
    assert first.times + second.times == 1


def test_F25_metadata_without_a_name(entry_points):
    entry_points(fakes.Point("good", GOOD, dist=fakes.EmptyDist()), fakes.Point("z", fakes.backend("z", 2), dist=None))
    assert names() == ["good", "z"]


def test_P4_two_third_parties_of_one_name(entry_points):
    points = [
        fakes.Point("fast", fakes.backend("fast", 8), dist="zeta", value="zeta:p"),
        fakes.Point("fast", fakes.backend("fast", 9), dist="acme", value="acme:p"),
    ]
    texts = set()
    for order in (points, points[::-1]):
        entry_points(fakes.Point("good", GOOD), *order)
        with pytest.warns(PluginWarning, match="2 plugins are named 'fast'"):
            assert names() == ["good"]
        (failure,) = registry.failures()
        assert failure.stage == "conflict"
        assert isinstance(failure.error, PluginConflictError)
        texts.add(str(failure))
        with pytest.raises(ForcedBackendError, match="acme:p"):
            registry.get("add", backend="fast")(0.0, 0.0)
    assert len(texts) == 1
    assert "acme:p (acme 1.0), zeta:p (zeta 1.0); none of them is used. Uninstall all but one" in texts.pop()
    assert points[0].times == points[1].times == 0


def test_P4_a_built_in_is_never_replaced_silently(entry_points):
    thief = fakes.Point("xla", fakes.backend("xla", 9), dist="acme", value="acme:p")
    own = fakes.Point("xla", fakes.backend("xla", 1), dist="opmux", value="opmux.plugins.xla")
    for order in ((thief, own), (own, thief)):
        entry_points(*order)
        with pytest.warns(PluginWarning, match="opmux.plugins.xla .opmux 1.0. is kept"):
            assert registry.get("add")(0.0, 0.0) == 1
        (failure,) = registry.failures()
        assert "acme:p (acme 1.0)" in str(failure)
    assert thief.times == 0


def test_warnings_as_errors_lose_nothing(entry_points):
    entry_points(fakes.Point("bad", ImportError("x")), fakes.Point("good", GOOD))
    with pytest.raises(PluginWarning):
        registry.get("add")(0.0, 0.0)
    assert registry.get("add")(0.0, 0.0) == 1
    assert len(registry.failures()) == 1


def test_a_discovery_that_raises_is_tried_again():
    answers = [OSError("disk"), [fakes.Point("good", GOOD)]]

    def read():
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    tables.loader = Loader(read)
    with pytest.raises(OSError, match="disk"):
        registry.backends()
    assert names() == ["good"]


@pytest.mark.parametrize("how", ["environment", "configure"])
def test_P5_F19_a_disabled_plugin_is_never_imported(monkeypatch, entry_points, how):
    point = fakes.Point("acme", fakes.plugin("acme", ops=[fakes.power_op()]))
    entry_points(point, fakes.Point("good", GOOD))
    if how == "environment":
        monkeypatch.setenv("OPMUX_DISABLE", "acme")
    else:
        registry.configure(disable=["acme"])
    assert registry.get("add")(0.0, 0.0) == 1
    assert list(registry.ops()) == ["add", "attention", "chunk_fwd_h", "matmul", "reduce"]
    assert (names(), registry.failures(), len(registry.implementations())) == (["good"], [], 1)
    with pytest.raises(OpmuxError, match="unknown op 'power'"):
        registry.get("power")
    with pytest.raises(OpmuxError, match="unknown op 'power'"):
        registry.use(backend="power=good")
    with pytest.raises(OpmuxError, match="unknown backend 'acne'"):
        registry.use(backend="acne")
    with pytest.raises(ForcedBackendError, match="disabled"):
        registry.get("add", backend="acme")(0.0, 0.0)
    with pytest.raises(OpmuxError):
        __import__("jax").jvp(registry.get("add"), (1.0, 1.0), (1.0, 1.0))
    assert "disabled" in str(registry.explain("add", 0.0, 0.0))
    assert point.times == 0
    monkeypatch.delenv("OPMUX_DISABLE", raising=False)
    registry.configure(disable=())
    assert "power" in registry.ops()


def test_F27_P5_a_forced_backend_imports_no_other(entry_points, monkeypatch):
    other = fakes.Point("other", fakes.backend("other", 2))
    mine = fakes.Point("mine", fakes.backend("mine", 1, vjp=fakes.gradient(7.0)))
    plain = fakes.Point("plain", fakes.backend("plain", 3))
    entry_points(other, mine, plain)
    jax = __import__("jax")
    assert registry.get("add", backend="mine")(0.0, 0.0) == 1
    assert jax.grad(registry.get("add", backend="mine"))(0.0, 0.0) == 7
    assert jax.grad(registry.get("add", backend="plain"))(0.0, 0.0) == 1
    with registry.use(backend="mine"):
        assert registry.get("add")(0.0, 0.0) == 1
    monkeypatch.setenv("OPMUX_BACKEND", "mine")
    assert registry.get("add")(0.0, 0.0) == 1
    assert (other.times, mine.times) == (0, 1)
    monkeypatch.delenv("OPMUX_BACKEND")
    assert [found.backend for found in registry.get("add", backend="mine").explain(0.0, 0.0).candidates] == [
        "mine", "other", "plain",
    ]  # fmt: skip
    assert other.times == 1


def test_a_plugin_that_uses_opmux_while_it_is_imported(entry_points):
    class Eager(fakes.Point):
        def load(self):
            assert registry.get("add")(0.0, 0.0) == 1
            return super().load()

    point = Eager("eager", fakes.backend("eager", 2, priority={"*": 9}))
    entry_points(point, fakes.Point("good", GOOD))
    assert registry.get("add", backend="eager")(0.0, 0.0) == 2
    assert (point.times, registry.failures()) == (1, [])


def test_threads_that_come_at_once_import_a_plugin_once(entry_points):
    class Slow(fakes.Point):
        def load(self):
            time.sleep(0.05)
            return super().load()

    point = Slow("good", GOOD)
    entry_points(point)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: float(registry.get("add")(0.0, 0.0)), range(8))) == {1.0}
    assert point.times == 1


def test_F27_names_are_known_without_an_import(entry_points):
    point = fakes.Point("acme", GOOD)
    loader = entry_points(point)
    registry.use(backend="acme")
    assert loader.names() == ["acme"]
    assert point.times == 0


def test_the_order_is_by_name(entry_points):
    made = {name: fakes.backend(name, 1) for name in "dbca"}
    entry_points(*(fakes.Point(name, plugin) for name, plugin in made.items()))
    assert names() == list("abcd")
    assert [found.backend for found in registry.implementations("add")] == list("abcd")


def test_register_unregister_and_register_again():
    add = registry.get("add")
    assert registry.register(fakes.backend("a", 1)) == "a"
    assert add(0.0, 0.0) == 1
    forced = registry.get("add", backend="a")
    registry.unregister("a")
    for call in (add, forced):
        with pytest.raises(OpmuxError):
            call(0.0, 0.0)
    with pytest.raises(PluginError, match="no plugin is named 'a'; there are: none"):
        registry.unregister("a")
    registry.register(fakes.backend("a", 2))
    assert add(0.0, 0.0) == forced(0.0, 0.0) == 2


def test_an_installed_plugin_can_be_taken_out_and_replaced(entry_points):
    entry_points(fakes.Point("good", GOOD))
    registry.unregister("good")
    assert names() == []
    registry.register(fakes.backend("good", 2))
    assert registry.get("add")(0.0, 0.0) == 2


def test_a_plugins_op_comes_and_goes_with_it():
    registry.register(
        fakes.plugin("acme", Implementation("power", kernel="fakes:power", forward_mode=True), ops=[fakes.power_op()])
    )
    power = registry.get("power")
    assert power(3.0) == 9
    assert power(2.0, power=3) == 8
    assert "power" in registry.ops()
    registry.unregister("acme")
    for call in (lambda: power(3.0), lambda: registry.get("power"), lambda: registry.implementations("power")):
        with pytest.raises(OpmuxError, match="unknown op 'power'"):
            call()


@pytest.mark.parametrize(
    "error",
    [
        PluginLoadError("a"), PluginValidationError("b"), PluginConflictError("c"),
        ForcedBackendError("d"),
    ],
)  # fmt: skip
def test_errors_pickle(error):
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), str(copied)) == (type(error), str(error))


def test_resolution_errors_pickle_with_their_decision():
    registry.register(fakes.backend("a", 1, supports=fakes.rejects()))
    with pytest.raises(ForcedBackendError) as caught:
        registry.get("add", backend="a")(0.0, 0.0)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert str(copied) == str(caught.value)
    assert copied.decision == caught.value.decision


def dist_info(folder, name, version, entry_points=None, metadata=True):
    folder = folder / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    if metadata:
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (folder / "entry_points.txt").write_text(f"[opmux]\n{entry_points}\n")


MODULE = """
from opmux.core.implementation import BackendInfo
from opmux.registry import hookimpl
@hookimpl
def opmux_backend():
    return BackendInfo("acme")
"""


def test_F25_real_metadata(tmp_path):
    """lib64 that links to lib, a stale dist-info, an empty one before a good one."""
    lib = tmp_path / "lib"
    (tmp_path / "stale").mkdir()
    dist_info(tmp_path / "stale", "acme", "0.1", "acme = acme_plugin")
    dist_info(tmp_path / "stale", "gone", "0.1", "gone = gone_plugin", metadata=False)
    dist_info(lib, "acme", "1.0", "acme = acme_plugin")
    (lib / "acme-0.9.dist-info").mkdir()
    (lib / "acme_plugin.py").write_text(MODULE)
    (tmp_path / "lib64").symlink_to(lib)
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "from opmux import registry\n"
        "print(sorted(registry.backends()), [failure.name for failure in registry.failures()])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{lib}:{tmp_path / 'lib64'}:{tmp_path / 'stale'}", "JAX_PLATFORMS": "cpu"},
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "'acme'" in found.stdout
    assert "['gone']" in found.stdout


def test_opmux_itself_is_found_through_the_same_door(installed):
    own = {point.name for point in importlib.metadata.entry_points(group="opmux")}
    assert own
    assert own <= set(tables.loader.names())
    assert {plugin.found.dist for plugin in tables.loader.load_all(frozenset()) if plugin.name in own} == {"opmux"}

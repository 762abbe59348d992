"""The house rules: who may import whom, what an import may not do, and how long a file may be."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("core", "registry", "plugins", "certify", "testing", "cli")
BUILTIN = sorted(folder.name for folder in (ROOT / "plugins").iterdir() if (folder / "__init__.py").exists())

# What each room may import of opmux; `plugins` has a rule of its own.
BELOW = {
    "core": {"core"},
    "registry": {"core", "registry"},
    "certify": {"core", "registry", "testing", "certify"},  # the oracles that simulated kernels are held against
    "testing": {"core", "registry", "testing"},
    "cli": set(ROOMS),
}
OUTSIDE = {
    "core": {"jax", "jaxlib", "numpy", "pydantic", "jaxtyping"},
    "registry": {"jax", "pluggy", "pydantic", "numpy"},
}


def files(*rooms):
    return sorted(path for room in rooms for path in (ROOT / room).rglob("*.py"))


def name(path):
    return str(path.relative_to(ROOT))


def imports(path):
    """Every module that a file imports, with the names that it takes from it, as dotted paths."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def typing_only(path):
    """Modules that a file imports for type checkers only."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for inner in ast.walk(ast.Module(node.body, [])):
                if isinstance(inner, ast.ImportFrom):
                    yield inner.module
                elif isinstance(inner, ast.Import):
                    yield from (alias.name for alias in inner.names)


def test_the_rooms_are_there():
    assert {"interpret", "xla"} <= set(BUILTIN)
    assert len(files(*ROOMS)) > 30


@pytest.mark.parametrize("path", files(*BELOW), ids=name)
def test_imports_point_downwards(path):
    room = path.relative_to(ROOT).parts[0]
    for module in imports(path):
        if module.startswith("opmux."):
            assert module.split(".")[1] in BELOW[room], f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", files("plugins"), ids=name)
def test_plugins_import_core_and_their_marker_only(path):
    own = f"opmux.plugins.{path.relative_to(ROOT).parts[1]}"
    for module in imports(path):
        if module.startswith("opmux."):
            allowed = (
                module.startswith(("opmux.core.", f"{own}."))
                or module in ("opmux.core", own)
                or module in ("opmux.registry.hookimpl", "opmux.registry.hookspecs.hookimpl")
            )
            assert allowed, f"{name(path)} imports {module}"


@pytest.mark.parametrize("path", files(*OUTSIDE), ids=name)
def test_core_and_registry_import_little_else(path):
    room = path.relative_to(ROOT).parts[0]
    allowed = {"opmux", "__future__", *OUTSIDE[room], *sys.stdlib_module_names}
    assert {module.split(".")[0] for module in imports(path)} <= allowed
    if "jaxtyping" in path.read_text():
        assert "jaxtyping" in set(typing_only(path)), f"{name(path)}: jaxtyping is no dependency of a plain install"


@pytest.mark.parametrize("path", files("core", "registry"), ids=name)
def test_core_and_registry_name_no_plugin(path):
    """As an entry point is the only door, no other code may know who stands behind it."""
    text = ast.parse(path.read_text())
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(text)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(text):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            tiers = node.value == "interpret"  # the name of a tier, as well as of the backend
            assert tiers or node.value not in BUILTIN, f"{name(path)}:{node.lineno} names {node.value!r}"
            assert "opmux.plugins" not in node.value, f"{name(path)}:{node.lineno}"


@pytest.mark.parametrize("path", files("core", "registry", "certify", "testing", "cli"), ids=name)
def test_pallas_is_for_plugins(path):
    if path != ROOT / "core" / "compat.py" and path.relative_to(ROOT).parts[0] != "certify":
        assert not [module for module in imports(path) if "pallas" in module], name(path)


@pytest.mark.parametrize("path", files(*ROOMS), ids=name)
def test_differences_between_jax_versions_are_in_one_place(path):
    if path == ROOT / "core" / "compat.py":
        return
    assert not [module for module in imports(path) if module.startswith("jax._src")], name(path)
    text = path.read_text()
    code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    assert not re.search(r"jax\._src|jax\.__version|jaxlib\.__version|version_info.*jax", code), name(path)


@pytest.mark.parametrize("path", files(*ROOMS), ids=name)
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 300


def run(code, tmp_path, **env):
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "/usr/bin:/bin", **env},
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return found.stdout


FORBIDDEN = ("opmux.plugins", "jax.experimental.pallas", "torch", "triton", "tensorflow", "jaxtyping", "opmux.cli")


def test_F27_P5_S6_importing_the_registry_imports_no_plugin_and_touches_no_device(tmp_path):
    out = run(
        f"""
import sys
from opmux import registry
from jax._src import xla_bridge
assert not xla_bridge._backends, xla_bridge._backends
registry.get("attention")
registry.use(backend="xla")
assert not xla_bridge._backends, xla_bridge._backends
print([name for name in sys.modules if name.startswith({FORBIDDEN!r})])
""",
        tmp_path,
    )
    assert out.strip() == "[]"
    assert list(tmp_path.iterdir()) == []  # nor does it write any file


@pytest.mark.parametrize("forced", ["xla", "interpret"])
def test_F27_a_forced_backend_imports_its_own_plugin_only(tmp_path, forced):
    out = run(
        """
import sys
from opmux import registry
registry.get("add")(1.0, 2.0)
print(sorted({".".join(name.split(".")[:3]) for name in sys.modules if name.startswith("opmux.plugins.")}))
""",
        tmp_path,
        OPMUX_BACKEND=forced,
    )
    assert out.strip() == f"['opmux.plugins.{forced}']"


def test_F20_listing_imports_no_kernel(tmp_path):
    out = run(
        """
import sys
from opmux import registry
assert len(registry.backends()) > 1 and registry.implementations() and registry.ops()
print([name for name in sys.modules if name.startswith(("jax.experimental.pallas", "torch", "triton"))])
""",
        tmp_path,
    )
    assert out.strip() == "[]"

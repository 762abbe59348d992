"""P8: a backend of somebody else, built and installed as pip does it, and used by another process."""

import json
import sys

import pytest

PYPROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{dist}"
version = "0.3"

[project.entry-points.opmux]
{name} = "{package}.plugin"

[tool.setuptools]
packages = ["{package}"]
"""

PLUGIN = """
from acme_kernels.ops import NEGATE
from opmux.core.implementation import BackendInfo, Implementation, Rejection
from opmux.registry.hookspecs import hookimpl


def supports(request, device):
    if request["x"].shape:
        return []
    return [Rejection("shape", "a scalar", "give it an axis")]


@hookimpl
def opmux_backend():
    return BackendInfo("acme", summary="kernels of Acme")


@hookimpl
def opmux_implementations():
    return [
        Implementation("add", kernel="acme_kernels.kernels:add", supports=supports, priority={"*": 99}),
        Implementation("negate", kernel="acme_kernels.kernels:negate", forward_mode=True),
    ]


@hookimpl
def opmux_ops():
    return [NEGATE]
"""

OPS = """
import jax.numpy as jnp
from opmux.core.op import Call, Cost, Op, make_request
from opmux.core.request import ArraySpec


def canonicalize(x):
    '''The negative of an array.'''
    operands = {"x": jnp.asarray(x)}
    return Call(make_request("negate", operands, None, ("out",)), operands, lambda outputs: outputs["out"])


NEGATE = Op(
    name="negate",
    canonicalize=canonicalize,
    outputs=lambda request: {"out": ArraySpec(request["x"].shape, request["x"].dtype)},
    reference=lambda request, operands: {"out": -operands["x"]},
    cost=lambda request: Cost(request["x"].size, 2 * request["x"].nbytes),
    differentiable=("x",),
)
"""

KERNELS = """
def add(request, operands, config):
    return {"out": operands["x"] + operands["y"] + 1000}


def negate(request, operands, config):
    return {"out": -operands["x"]}
"""


def source(folder, dist, name, package, **modules):
    (folder / package).mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PYPROJECT.format(dist=dist, name=name, package=package))
    for module, text in {"__init__": "", **modules}.items():
        (folder / package / f"{module}.py").write_text(text)
    return folder


@pytest.fixture(scope="module")
def site(pip, tmp_path_factory):
    """A folder with two distributions in it, one of which cannot be imported."""
    work = tmp_path_factory.mktemp("third_party")
    good = source(work / "good", "Acme.Kernels", "acme", "acme_kernels", plugin=PLUGIN, ops=OPS, kernels=KERNELS)
    bad = source(work / "bad", "broken-kernels", "broken", "broken_kernels", plugin="import libbroken_is_missing")
    pip("install", "--no-deps", "--target", work / "site", good, bad, cwd=work)
    return work / "site"


@pytest.fixture
def python(site, run, tmp_path):
    """Runs code in a process that finds those distributions, and reads the JSON that it prints."""
    prelude = "import json, sys, warnings\nwarnings.simplefilter('ignore')\nfrom opmux import registry\n"

    def given(code, **env):
        return json.loads(run(sys.executable, "-c", prelude + code, cwd=tmp_path, **env, PYTHONPATH=str(site)))

    return given


def test_it_is_used_and_listed(python):
    found = python(
        """
import jax, jax.numpy as jnp
x = jnp.ones(2)
listed = "acme" in registry.backends(), "negate" in registry.ops(), len(registry.implementations("negate"))
early = [name for name in sys.modules if name == "acme_kernels.kernels"]
decision = registry.explain("add", 1.0, 1.0)
print(json.dumps({
    "listed": listed, "early": early,
    "add": registry.get("add")(x, x).tolist(),
    "scalar": float(registry.get("add")(1.0, 1.0)),
    "negate": registry.get("negate")(x).tolist(),
    "slope": jax.grad(lambda x: registry.get("negate")(x).sum())(x).tolist(),
    "jvp": float(jax.jvp(registry.get("negate"), (1.0,), (1.0,))[1]),
    "reason": [reason.detail for reason in decision.candidate("acme").reasons],
    "failures": [(failure.name, failure.reason, failure.found.dist) for failure in registry.failures()],
}))
"""
    )
    assert found == {
        "listed": [True, True, 1],
        "early": [],
        "add": [1002, 1002],
        "scalar": 2,
        "negate": [-1, -1],
        "slope": [-1, -1],
        "jvp": -1,
        "reason": ["a scalar"],
        "failures": [["broken", "ModuleNotFoundError: No module named 'libbroken_is_missing'", "broken-kernels"]],
    }


FORCED = """
import jax.numpy as jnp
result = registry.get("add")(jnp.ones(2), jnp.ones(2)).tolist()
try:
    registry.get("add")(1.0, 1.0)
except registry_errors.ForcedBackendError as error:
    problem = str(error)
print(json.dumps({"result": result, "problem": problem, "broken": "broken_kernels" in sys.modules}))
"""


def test_it_is_forced_by_the_environment(python):
    found = python("import opmux.core.errors as registry_errors\n" + FORCED, OPMUX_BACKEND="acme")
    assert found["result"] == [1002, 1002]
    assert "environment forces acme" in found["problem"]
    assert "shape: a scalar" in found["problem"]


def test_it_is_disabled_by_the_environment(python):
    code = """
print(json.dumps([float(registry.get("add")(1.0, 1.0)), "negate" in registry.ops(), "acme_kernels" in sys.modules]))
"""
    assert python(code, OPMUX_DISABLE="acme,broken") == [2, False, False]


def test_the_command_knows_it(site, run, tmp_path):
    listed = run(sys.executable, "-m", "opmux.cli", "list", cwd=tmp_path, PYTHONPATH=str(site), PYTHONWARNINGS="ignore")
    assert "acme" in listed
    assert "negate" in listed
    assert "broken" in listed

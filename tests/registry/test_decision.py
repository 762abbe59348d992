"""The record of a choice: as text, as JSON, and inside errors."""

import json
import subprocess
import sys

import fakes
import jax
import jax.numpy as jnp
import pytest

from opmux import registry
from opmux.core.errors import ForcedBackendError
from opmux.registry import Decision


@pytest.fixture
def zoo(entry_points):
    long = "the rows of the block have 262,144 bytes, and a block of this device can have 232,448 bytes at most"
    entry_points(
        fakes.Point("acme", ImportError("libacme.so.1: cannot open shared object file"), version="0.3"),
        fakes.Point("off", fakes.backend("off", 1)),
        fakes.Point("gpu_kernels", fakes.backend("gpu_kernels", 1, info={"platforms": ("cuda",)})),
        fakes.Point("picky", fakes.backend("picky", 1, supports=lambda request, device: [
            registry.Rejection("dtype", "f32 is not bf16", "cast the operands"), registry.Rejection("shape", long),
        ])),
        fakes.Point("plain", fakes.backend("plain", 2, info={"tier": "reference"}, config=fakes.Blocks)),
        fakes.Point("quick", fakes.backend("quick", 3, priority={"cpu": 10}, vjp=fakes.gradient(1.0))),
    )  # fmt: skip


X = jax.ShapeDtypeStruct((2, 3), jnp.float32)

SELECTED = """\
add  x f32[2,3]  y f32[2,3]  AddParams()
policy    scope: prefer=plain
policy    environment: disable=off
device    cpu (cpu)
chosen    plain: preferred
config    block=64
backward  quick: the only viable backend
  1 plain        selected  reference, priority 0
  2 quick        viable    kernel, priority 10
  - acme         failed    plugin-failed: ImportError: libacme.so.1: cannot open
                           shared object file
                           hint: see `opmux doctor`
  - gpu_kernels  rejected  platform: runs on cuda, not on cpu
  - off          rejected  disabled: the plugin is disabled
                           hint: take it out of OPMUX_DISABLE
  - picky        rejected  dtype: f32 is not bf16
                           hint: cast the operands
                           shape: the rows of the block have 262,144 bytes, and
                           a block of this device can have 232,448 bytes at most"""

FORCED = """\
add: call forces picky, gpu_kernels, which cannot run this request on cpu.

add  x f32[2,3]  y f32[2,3]  AddParams()
policy    call: backend="*=picky,gpu_kernels"
policy    environment: disable=off
device    cpu (cpu)
chosen    none: call forces picky, gpu_kernels, which cannot run this request
  - picky        rejected  dtype: f32 is not bf16
                           hint: cast the operands
                           shape: the rows of the block have 262,144 bytes, and
                           a block of this device can have 232,448 bytes at most
  - gpu_kernels  rejected  platform: runs on cuda, not on cpu
  - acme         failed    plugin-failed: ImportError: libacme.so.1: cannot open
                           shared object file
                           hint: see `opmux doctor`
  - off          rejected  disabled: the plugin is disabled
                           hint: take it out of OPMUX_DISABLE
  1 plain        viable    reference, priority 0
  2 quick        viable    kernel, priority 10"""


@pytest.mark.filterwarnings("ignore::opmux.core.errors.PluginWarning")
def test_F28_the_text_of_a_decision_and_of_an_error(zoo, monkeypatch):
    monkeypatch.setenv("OPMUX_DISABLE", "off")
    with registry.use(prefer=["plain"]):
        decision = registry.explain("add", X, X)
    assert str(decision) == SELECTED
    with pytest.raises(ForcedBackendError) as caught:
        registry.get("add", backend="picky,gpu_kernels")(jnp.zeros((2, 3)), jnp.zeros((2, 3)))
    assert str(caught.value) == FORCED


@pytest.mark.filterwarnings("ignore::opmux.core.errors.PluginWarning")
def test_text_fits_80_columns(zoo):
    q, bias = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 4096, 32, 256), (128, 32, 4096, 4096)))
    for decision in (registry.explain("add", X, X), registry.explain("attention", q, q, q, bias)):
        assert max(map(len, str(decision).splitlines())) <= 80


@pytest.mark.filterwarnings("ignore::opmux.core.errors.PluginWarning")
def test_json_round_trip(zoo):
    for decision in (registry.explain("add", X, X), registry.get("add", backend="picky").explain(X, X)):
        text = decision.model_dump_json()
        assert Decision.model_validate_json(text) == decision
        assert json.loads(text)["candidates"][0]["backend"] == decision.candidates[0].backend
        assert str(Decision.model_validate_json(text)) == str(decision)


def test_explain_says_what_runs_and_runs_nothing():
    calls = []
    registry.register(fakes.backend("a", 1, calls=calls, vjp=fakes.gradient(1.0, calls)))
    decision = registry.explain("add", X, y=X)
    assert (decision.backend, decision.backward.backend, calls) == ("a", "a", [])
    assert registry.get("add", backend="a").explain(jnp.ones(3), 2.0).request.startswith("add  x f32[3]  y f32[1]")


def test_explain_of_a_call_that_the_op_does_not_take():
    registry.register(fakes.backend("a", 1))
    with pytest.raises(TypeError, match="'y'"):
        registry.explain("add", X)
    with pytest.raises(ValueError, match="broadcast"):
        registry.explain("add", X, jax.ShapeDtypeStruct((4,), jnp.float32))


def test_explain_under_force_lists_the_others_too():
    registry.register(fakes.backend("a", 1))
    registry.register(fakes.backend("b", 1))
    decision = registry.get("add", backend="b").explain(X, X)
    assert [(found.backend, found.state) for found in decision.candidates] == [("b", "selected"), ("a", "viable")]


def test_decisions_are_the_same_in_every_process(tmp_path):
    """Nothing depends on the hash seed, or on the order of a file system."""
    code = (
        "import jax; from opmux import registry; x = jax.ShapeDtypeStruct((1, 64, 4, 32), 'float32')\n"
        "print(registry.explain('attention', x, x, x).model_dump_json())"
    )
    texts = set()
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        texts.add(found.stdout)
    assert len(texts) == 1

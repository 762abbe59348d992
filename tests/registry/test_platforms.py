"""Several kinds of device in one process, devices that are not there, and staging by platform."""

import subprocess
import sys

import fakes
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from opmux import registry
from opmux.core.errors import ForcedBackendError, MixedDeviceError, NoViableImplementationError, SettingError
from opmux.core.implementation import Implementation

CUDA, TPU, CPU = {"platforms": ("cuda",)}, {"platforms": ("tpu",)}, {"platforms": ("cpu",)}


@pytest.fixture
def one_for_each():
    for marker, (name, info) in enumerate((("for_cuda", CUDA), ("for_tpu", TPU), ("for_cpu", CPU)), 1):
        registry.register(fakes.backend(name, float(marker), info=info, vjp=fakes.gradient(float(marker))))


def at(place, shape=()):
    """Zeros committed to one of the devices of the process."""
    return jax.device_put(jnp.zeros(shape), jax.devices("cpu")[place])


def lowered(function, platform, *args):
    return jax.jit(function).trace(*args).lower(lowering_platforms=(platform,)).as_text(debug_info=True)


@pytest.mark.parametrize(("accelerator", "marker"), [("h200", 1.0), ("tpu-v6e", 2.0)])
def test_S6_F14_J1_arrays_decide_by_where_they_live(process_with, one_for_each, accelerator, marker):
    process_with(accelerator, "cpu")
    add = registry.get("add")
    assert add(at(0), at(0)) == marker
    assert add(at(1), at(1)) == 3
    assert add(at(1), 0.0) == 3  # what is committed decides
    assert add(at(0), np.zeros(())) == marker
    assert add(0.0, 0.0) == marker  # nothing is: the default device
    assert add(at(1), y=at(1)) == 3
    assert add.explain(at(1), at(1)).device == "cpu"
    assert add.explain(at(0), 0.0).device == accelerator


def test_F14_two_kinds_of_one_platform_decide_by_the_arrays_device(process_with):
    process_with("h200", "a100")
    registry.register(fakes.backend("hopper", 1.0, supports=fakes.only("h200"), priority={"*": 9}))
    registry.register(fakes.backend("ampere", 2.0, supports=fakes.only("a100"), priority={"*": 8}))
    registry.register(fakes.backend("any", 3.0))
    add = registry.get("add")
    assert [float(add(at(place), at(place))) for place in (0, 1, 0, 1)] == [1, 2, 1, 2]
    # Under jit it may be either, so it has to be one that holds for both.
    assert jax.jit(add)(0.0, 0.0) == 3
    registry.unregister("any")
    with pytest.raises(NoViableImplementationError, match=r"every kind of\s+cuda device of this process"):
        jax.jit(add)(0.0, 0.0)


def test_arrays_on_two_kinds_of_device_are_refused(process_with, one_for_each):
    process_with("h200", "cpu")
    with pytest.raises(MixedDeviceError, match=r"h200 \(cuda\), cpu \(cpu\); move them to one"):
        registry.get("add")(at(0), at(1))
    with pytest.raises(MixedDeviceError):
        registry.explain("add", at(0), at(1))


@pytest.mark.parametrize("accelerator", ["h200", "tpu-v6e"])
def test_J8_F16_a_trace_holds_a_branch_for_each_platform_and_lowers_its_own(process_with, one_for_each, accelerator):
    process_with(accelerator, "cpu")
    platform, own, other = ("cuda", "for_cuda", "for_tpu") if accelerator == "h200" else ("tpu", "for_tpu", "for_cuda")
    add = registry.get("add")
    assert jax.jit(add)(0.0, 0.0) == 3  # this process lowers for cpu, whatever it pretends to be
    text = lowered(add, platform, 0.0, 0.0)
    assert f"opmux.add[{own}]" in text
    assert "for_cpu" not in text
    text = lowered(add, "cpu", 0.0, 0.0)
    assert "opmux.add[for_cpu]" in text
    assert other not in text
    with pytest.raises(ForcedBackendError, match=r"was traced for .*, cpu; trace it inside registry.use\(device=...\)"):
        lowered(add, "rocm", 0.0, 0.0)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: lambda x: jax.vmap(f)(x).sum(),
        lambda f: lambda x: jax.lax.scan(lambda c, y: (f(c + 0 * y), None), x[0], x)[0],
        lambda f: lambda x: jax.lax.fori_loop(0, 2, lambda _, c: f(c), x[0]),
        lambda f: lambda x: jax.checkpoint(f)(x).sum(),
        lambda f: lambda x: jax.grad(lambda x: f(x).sum())(x).sum(),
        lambda f: lambda x: jax.vmap(jax.grad(f))(x).sum(),
        lambda f: lambda x: jax.grad(lambda x: jax.lax.scan(lambda c, y: (f(c) * y, None), 1.0, x)[0])(x).sum(),
        lambda f: lambda x: jax.grad(lambda x: jax.checkpoint(jax.vmap(f))(x).sum())(x).sum(),
    ],
    ids=["vmap", "scan", "fori_loop", "remat", "grad", "vmap(grad)", "grad(scan)", "grad(remat(vmap))"],
)
@pytest.mark.parametrize("forced", [None, "for_cuda"])
def test_J8_J10_F16_staging_under_transforms(process_with, one_for_each, transform, forced):
    """Also with a branch that cannot be lowered on the device that runs it: a forced backend of another platform."""
    process_with("h200", "cpu")
    f = transform(lambda x: registry.get("add", backend=forced)(x, x))
    x = jnp.arange(3.0)
    assert jax.eval_shape(f, x).shape == ()
    text = lowered(f, "cuda", x)
    assert "[for_cuda]" in text
    assert "[for_cpu]" not in text
    if forced is None:
        assert np.isfinite(jax.jit(f)(x))
    else:
        with pytest.raises(ForcedBackendError, match="platform: runs on cuda, not on cpu"):
            jax.jit(f)(x)


def test_J9_J10_a_forced_backend_of_another_platform_raises_when_lowered_for_this_one(process_with, one_for_each):
    process_with("h200", "cpu")
    add = registry.get("add", backend="for_cuda")
    assert add(at(0), at(0)) == 1
    assert jax.eval_shape(add, 0.0, 0.0).shape == ()
    assert "opmux.add[for_cuda]" in lowered(add, "cuda", 0.0, 0.0)
    for call in (lambda: lowered(add, "cpu", 0.0, 0.0), lambda: jax.jit(add)(0.0, 0.0), lambda: add(at(1), at(1))):
        with pytest.raises(ForcedBackendError, match="call forces for_cuda") as caught:
            call()
        assert "platform: runs on cuda, not on cpu" in str(caught.value)
        assert caught.value.decision.device == "cpu"


def test_where_nothing_runs_on_one_platform_the_others_still_lower(process_with):
    process_with("h200", "cpu")
    registry.register(fakes.backend("for_cuda", 1.0, info=CUDA))
    add = registry.get("add")
    assert "for_cuda" in lowered(add, "cuda", 0.0, 0.0)
    with pytest.raises(NoViableImplementationError, match="every backend rejected this request"):
        jax.jit(add)(0.0, 0.0)


def test_one_choice_for_all_platforms_needs_no_staging(process_with):
    process_with("h200", "cpu")
    registry.register(fakes.backend("everywhere", 1.0))
    jaxpr = str(jax.make_jaxpr(registry.get("add"))(0.0, 0.0))
    assert "platform_index" not in jaxpr
    assert jax.jit(registry.get("add"))(0.0, 0.0) == 1


def test_rules_for_a_platform_apply_to_its_branch(process_with):
    process_with("h200", "cpu")
    for name, marker in (("a", 1.0), ("b", 2.0)):
        registry.register(fakes.backend(name, marker))
    with registry.use(backend="add@cuda=b;*@cpu=a"):
        text = lowered(registry.get("add"), "cuda", 0.0, 0.0)
        assert "opmux.add[b]" in text
        assert "opmux.add[a]" not in text
        assert jax.jit(registry.get("add"))(0.0, 0.0) == 1
        assert registry.get("add")(at(0), at(0)) == 2


@pytest.mark.parametrize(
    ("device", "platform", "backend"), [("h200", "cuda", "for_cuda"), ("tpu-v6e", "tpu", "for_tpu")]
)
def test_a_device_that_is_absent_can_be_lowered_for(one_for_each, device, platform, backend):
    with registry.use(device=device):
        assert f"opmux.add[{backend}]" in lowered(registry.get("add"), platform, 0.0, 0.0)
        assert registry.explain("add", 0.0, 0.0).backend == backend
        text = registry.get("add").lower(0.0, 0.0).as_text(debug_info=True)
        assert f"opmux.add[{backend}]" in text
    shape = jax.ShapeDtypeStruct((3,), "float32")
    text = registry.get("add", device=device).lower(shape, y=shape).as_text(debug_info=True)
    assert f"opmux.add[{backend}]" in text
    assert jax.jit(registry.get("add"))(0.0, 0.0) == 3


@pytest.mark.parametrize("how", ["call", "scope", "configure"])
@pytest.mark.parametrize("by_name", [False, True])
def test_an_eager_call_for_a_device_of_another_platform_is_refused(one_for_each, how, by_name):
    if how == "configure":
        registry.configure(device="h200")
    with registry.use(device="h200" if how == "scope" else None):
        add = registry.get("add", device="h200" if how == "call" else None)
        assert add.explain(0.0, 0.0).backend == "for_cuda"
        with pytest.raises(
            MixedDeviceError, match=r"device='h200' \(cuda\) was asked for, but the arguments live on cpu"
        ):
            add(0.0, y=0.0) if by_name else add(0.0, 0.0)
    if how == "configure":
        registry.configure(device="")
        assert registry.get("add")(0.0, 0.0) == 3


def test_a_device_of_the_same_platform_may_be_named(one_for_each):
    assert registry.get("add", device="cpu")(0.0, 0.0) == 3
    with registry.use(device=jax.devices("cpu")[2]):
        assert registry.get("add")(0.0, 0.0) == 3


def test_the_inner_scope_names_the_device(one_for_each):
    with registry.use(device="h200"), registry.use(device="tpu-v6e"):
        assert registry.explain("add", 0.0, 0.0).backend == "for_tpu"
        assert registry.get("add", device="cpu").explain(0.0, 0.0).backend == "for_cpu"


def test_a_device_that_means_nothing():
    with pytest.raises(ValueError, match="did you mean 'h200'"):
        registry.get("add", device="h2000")
    with pytest.raises(SettingError, match="got a int"):
        registry.get("add", device=3)


def test_J7_the_mesh_of_a_trace_knows_its_device(process_with, one_for_each):
    process_with("h200", "cpu")
    add = registry.get("add")
    mesh = Mesh(np.array(jax.devices("cpu")[1:3]), ("x",))
    x = jax.device_put(jnp.zeros(4), NamedSharding(mesh, PartitionSpec("x")))
    assert "platform_index" in str(jax.make_jaxpr(add)(x, x))
    with jax.set_mesh(mesh):
        assert "platform_index" not in str(jax.make_jaxpr(add)(x, x))
        assert jax.jit(add)(x, x).tolist() == [3] * 4
    assert add(x, x).tolist() == [3] * 4


def test_explain_for_an_absent_device_touches_none(tmp_path):
    code = """
import jax
from jax._src import xla_bridge
def forbidden(*args, **kwargs): raise AssertionError("a device was touched")
xla_bridge.backends = xla_bridge.get_backend = xla_bridge.local_devices = jax.devices = jax.local_devices = forbidden
from opmux import registry
x = jax.ShapeDtypeStruct((1, 64, 4, 64), "bfloat16")
for device in ("h200", "tpu-v6e", "cpu"):
    with registry.use(device=device):
        print(registry.explain("attention", x, x, x, is_causal=True, key_value_seq_lengths=None).device)
    print(registry.get("add", device=device).explain(x, 2.0).platform)
assert not xla_bridge._backends
"""
    found = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.split() == ["h200", "cuda", "tpu-v6e", "tpu", "cpu", "cpu"]


def tpu_remainders(request, operands, config):
    """A kernel with index arithmetic that Pallas lowers for one kind of TPU."""
    x = operands["x"]
    block = pl.BlockSpec((8, 128), lambda i: (i % 3, 0))
    return {"out": pl.pallas_call(lambda x_ref, out_ref: None, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(3,),
                                  in_specs=[block], out_specs=block)(x)}  # fmt: skip


@pytest.mark.parametrize("transform", [lambda f: f, jax.vmap, jax.value_and_grad], ids=["plain", "vmap", "grad"])
def test_a_kernel_is_traced_for_the_absent_device_it_is_lowered_for(transform):
    implementation = Implementation("add", kernel=tpu_remainders, priority={"tpu": 99})
    registry.register(fakes.plugin("remainders", implementation, **TPU))
    x = jax.ShapeDtypeStruct((2, 24, 128) if transform is jax.vmap else (24, 128), "float32")
    run = transform(lambda x: registry.get("add")(x, x).sum())
    with registry.use(device="tpu-v6e"):
        text = jax.jit(run).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text

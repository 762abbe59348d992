import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from opmux.core import compat, devices
from opmux.core.devices import Device
from opmux.core.errors import OpmuxError, UnknownDeviceError

DOCS = Path(__file__).parents[2] / "docs"
ACCELERATORS = [name for name in devices.names() if name != "cpu"]

SPELLINGS = {
    "cpu": ["cpu", "CPU"],
    "a100": ["a100", "A100", "nvidia a100", "NVIDIA A100-SXM4-80GB"],
    "h100": ["h100", "NVIDIA H100", "NVIDIA H100 80GB HBM3"],
    "h200": ["h200", "H200", "nvidia h200", "NVIDIA H200"],
    "b200": ["b200", "NVIDIA B200"],
    "tpu-v4": ["tpu-v4", "v4", "TPU v4", "tpu_v4"],
    "tpu-v5e": ["tpu-v5e", "v5e", "TPU v5 lite", "TPU v5e"],
    "tpu-v5p": ["tpu-v5p", "v5p", "TPU v5", "TPU v5p"],
    "tpu-v6e": ["tpu-v6e", "v6e", "TPU v6 lite", "TPU v6e", "trillium"],
    "tpu-v7x": ["tpu-v7x", "v7x", "TPU7x", "tpu7x", "Ironwood"],
}


@pytest.mark.parametrize(("name", "spelling"), [(name, text) for name in SPELLINGS for text in SPELLINGS[name]])
def test_device_takes_every_spelling(name: str, spelling: str) -> None:
    assert devices.device(spelling).name == name


def test_every_declared_device_has_its_spellings_tested() -> None:
    assert set(SPELLINGS) == set(devices.names())


@pytest.mark.parametrize("name", ["h300", "v6", "", "tpu", "cuda", "h100 pcie"])
def test_unknown_devices_are_refused(name: str) -> None:
    with pytest.raises(UnknownDeviceError, match="Known: a100, b200, cpu, h100") as caught:
        devices.device(name)
    assert isinstance(caught.value, OpmuxError)


def test_unknown_device_names_near_ones_and_tells_platforms_apart() -> None:
    with pytest.raises(UnknownDeviceError, match="did you mean 'tpu-v5e'"):
        devices.device("tpu-v5ee")
    with pytest.raises(UnknownDeviceError, match="'cuda' is a platform"):
        devices.device("cuda")


@pytest.mark.parametrize("name", ACCELERATORS)
def test_every_figure_has_a_source(name: str) -> None:
    device = devices.device(name)
    sourced = ", ".join(source.partition(":")[0] for source in device.sources)
    own = {"name", "platform", "kind", "kinds", "sources", "devices_per_chip"}
    for figure, value in device.to_json().items():
        assert figure in own or not value or figure in sourced, f"{figure} = {value} has no source"


@pytest.mark.parametrize("name", ACCELERATORS)
def test_figures_are_plausible(name: str) -> None:
    device = devices.device(name)
    assert 1e11 < device.hbm_bandwidth < 1e13
    assert 8e9 < device.hbm_bytes < 300e9
    assert 1e14 < device.peak(jnp.bfloat16) < 1e16
    assert device.peak("complex64") == 0.0
    if device.platform == "cuda":
        assert device.smem_per_block == device.smem_per_sm - 1024
        assert device.peak("f32") < device.peak("tf32") < device.peak("f16") < device.peak("int8")


@pytest.mark.parametrize(("name", "cores"), [("v4", 2), ("v5e", 1), ("v5p", 2), ("v6e", 1), ("v7x", 1)])
def test_tpus_agree_with_the_table_of_jax(name: str, cores: int) -> None:
    tpu = pytest.importorskip("jax.experimental.pallas.tpu")
    device = devices.device(name)
    # One JAX device is both cores of a megacore chip, and one core of v7x.
    info = tpu.get_tpu_info_for_chip(tpu.ChipVersion(name.removeprefix("v") if name == "v7x" else name), cores)
    assert cores == device.cores_per_chip // device.devices_per_chip
    assert device.vmem_bytes == info.vmem_capacity_bytes
    assert device.smem_bytes == info.smem_capacity_bytes
    assert device.mxu_size == info.mxu_column_size
    assert device.hbm_bytes == pytest.approx(info.hbm_capacity_bytes * cores, rel=0.02)
    assert device.peak("bf16") == pytest.approx(info.bf16_ops_per_second * cores, rel=0.01)
    assert device.hbm_bandwidth == pytest.approx(info.mem_bw_bytes_per_second * cores, rel=0.13)


def test_peak_takes_dtypes_and_their_names() -> None:
    h200 = devices.device("h200")
    assert h200.peak(jnp.bfloat16) == h200.peak("bfloat16") == h200.peak("bf16") == 989.4e12
    assert h200.peak(jnp.float8_e5m2) == h200.peak("int8") == h200.peak(jnp.uint8) == 2 * 989.45e12
    assert h200.peak(jnp.float32) == 66.9e12
    assert devices.device("a100").peak(jnp.float8_e5m2) == 0.0


def test_devices_are_plain_hashable_data() -> None:
    assert len({devices.device(name) for name in devices.names()}) == len(devices.names()) == 10
    for name in devices.names():
        assert json.loads(json.dumps(devices.device(name).to_json()))["name"] == name


def fake(kind: str, platform: str = "gpu", runtime: str = "PJRT C API\ncuda 12090", **facts: object) -> SimpleNamespace:
    """What a `jax.Device` tells; made anew, so that no cached answer is seen."""
    client = SimpleNamespace(platform_version=runtime)

    class Fake(SimpleNamespace):
        __hash__ = object.__hash__

    return Fake(device_kind=kind, platform=platform, client=client, **facts)


@pytest.mark.parametrize("name", ACCELERATORS)
def test_from_jax_knows_every_declared_kind(name: str) -> None:
    device = devices.device(name)
    for kind in (device.kind, *device.kinds):
        platform = "gpu" if device.platform == "cuda" else device.platform
        assert devices.from_jax(fake(kind, platform)) is device


def test_from_jax_describes_the_device_that_is_here() -> None:
    here = devices.from_jax(jax.devices("cpu")[0])
    assert here is devices.device("cpu")
    assert devices.from_jax(jax.devices("cpu")[0]) is here


def test_from_jax_describes_cuda_devices_that_are_not_declared() -> None:
    found = devices.from_jax(fake("NVIDIA H100 PCIe", compute_capability="9.0", core_count=114))
    assert (found.name, found.platform, found.kind) == ("nvidia-h100-pcie", "cuda", "NVIDIA H100 PCIe")
    assert (found.compute_capability, found.sm_count, found.smem_per_block) == ((9, 0), 114, 232448)
    assert found.peak("bf16") == 0.0


def test_from_jax_describes_rocm_devices() -> None:
    found = devices.from_jax(fake("AMD Instinct MI300X", runtime="rocm 60100", compute_capability="gfx942"))
    assert (found.name, found.platform) == ("amd-instinct-mi300x", "rocm")
    assert found.compute_capability is None
    assert found.smem_per_block == 0


@pytest.mark.parametrize("capability", [None, "", "gfx942", "9", "9.0a"])
def test_odd_compute_capabilities_are_unknown(capability: str | None) -> None:
    assert devices.from_jax(fake("NVIDIA X1", compute_capability=capability)).compute_capability is None


def test_from_jax_takes_abstract_devices() -> None:
    abstract = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    assert devices.from_jax(abstract).name == "tpu-v6e"
    new = jax.sharding.AbstractDevice(device_kind="TPU v99", num_cores=1, platform="tpu")
    assert devices.from_jax(new) == Device("tpu-v99", "tpu", "TPU v99")


@pytest.mark.parametrize(
    ("kind", "platform", "runtime", "expected"),
    [
        ("NVIDIA H200", "gpu", "PJRT C API\ncuda 12090", "cuda"),
        ("AMD Instinct MI300X", "gpu", "PJRT C API\nrocm 60400", "rocm"),
        ("gfx942", "gpu", "", "rocm"),
        ("NVIDIA H200", "gpu", "", "cuda"),
        ("NVIDIA H200", "cuda", "", "cuda"),
        ("TPU v4", "tpu", "", "tpu"),
        ("cpu", "cpu", "", "cpu"),
    ],
)
def test_device_platform(kind: str, platform: str, runtime: str, expected: str) -> None:
    assert compat.device_platform(fake(kind, platform, runtime)) == expected


def test_looking_a_device_up_initialises_no_jax_backend() -> None:
    program = (
        "from opmux.core import devices\n"
        "devices.device('h200').peak('bfloat16'); devices.device('v6e').to_json()\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge.backends_are_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd="/")


def test_the_documentation_page_is_up_to_date() -> None:
    made = runpy.run_path(str(DOCS / "make_devices.py"))["page"]()
    assert (DOCS / "devices.md").read_text(encoding="utf-8") == made, "run docs/make_devices.py"

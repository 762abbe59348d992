"""libtpu's compiler in a child process that has no TPU: what it dumps, kernel by kernel."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from opmux.certify import measure_tpu
from opmux.certify.kernels import PallasCall
from opmux.certify.results import KernelMeasures
from opmux.certify.targets import Target

ENVIRONMENT: Mapping[str, str | None] = {
    # These keep libtpu from looking for a TPU.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Several of these children run at a time, and a process that holds a real TPU may run beside them.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
UNTRUSTED = "the compiler's cycle estimate is left out: control flow depends on data in SMEM, which it does not know"

# Alternatives without spaces: libtpu splits its flags at them.
_BUNDLES = (
    "--xla_jf_dump_to={0} --xla_jf_dump_llo_text=true "
    "--xla_jf_dump_llo_pass_label_regex=final_(bundles|hlo-static)|post-delay-converter"
)
_MOSAIC = " --xla_mosaic_dump_to={0}/mosaic"
_PROFILE = "--xla_jf_dump_static_llo_profile_to={0}"
_folder: Path | None = None


def start(scratch: Path, *, texts: bool = False, profile: bool = False) -> None:
    """Have the compiler dump into a folder of this process; its flags are read once, when libtpu loads.

    Args:
      scratch: folder to make that folder in.
      texts: dump what is only kept to be read, too; that takes half as long again.
      profile: dump cycle estimates only.
    """
    global _folder
    if _folder is None:
        _folder = scratch / str(os.getpid())
        _folder.mkdir(parents=True)
        os.environ["LIBTPU_INIT_ARGS"] = (_PROFILE if profile else _BUNDLES + _MOSAIC * texts).format(_folder)


def clear() -> None:
    """Forget what was dumped."""
    assert _folder is not None
    for path in _folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


@cache
def topology(target: Target) -> Any:
    """The target's topology."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=target.topology)


def measure(
    target: Target, text: str, hlo: str, calls: Sequence[PallasCall], keep: Path | None
) -> Iterator[KernelMeasures]:
    """Measures of every Mosaic kernel of a program that has just been compiled.

    Args:
      target: not used.
      text: not used.
      hlo: the compiled program, whose ops the dumps are named after.
      calls: the kernels in the traced program.
      keep: folder to keep dumped texts in.
    """
    assert _folder is not None
    files: dict[str, dict[str, Path]] = {}
    for path in sorted(_folder.iterdir()):
        if (found := measure_tpu.dumped(path.name)) is not None:
            files.setdefault(found[0], {})[found[1]] = path
    # Of equal kernels the compiler compiles one.
    names = measure_tpu.kernel_names(op for op in measure_tpu.custom_calls(hlo) if "llo" in files.get(op, {}))
    for op, name in names.items():
        read = {kind: path.read_text() for kind, path in files[op].items()}
        figures = measure_tpu.figures(read["llo"], read.get("slots", ""), read.get("allocations", ""))
        same = [call for call in calls if call.name == name]
        if len(same) == 1:
            figures |= measure_tpu.bundle_cycles(figures, same[0].steps)
        warnings = (UNTRUSTED,) if any(call.data_dependent for call in same) else ()
        yield KernelMeasures(kernel=name, figures=figures, warnings=warnings, files=_kept(name, files[op], keep))


def _kept(name: str, files: Mapping[str, Path], keep: Path | None) -> dict[str, str]:
    if keep is None:
        return {}
    assert _folder is not None
    keep.mkdir(parents=True, exist_ok=True)
    originals = sorted((_folder / "mosaic").glob("*-original.txt"))
    # Older versions name none of them; one is this kernel's.
    named = [path for path in originals if f"-dump-{name}-" in path.name] or originals
    files = {**files, **({"mosaic": named[0]} if len(named) == 1 else {})}
    return {kind: str(shutil.copy(path, keep / f"{name}.{kind}.txt")) for kind, path in files.items()}


def profile(name: str) -> float:
    """The cycles that the compiler estimates for a kernel that has just been compiled; 0 if it gave none."""
    assert _folder is not None
    found = [path for path in _folder.glob("*.textproto") if path.name.startswith(name)]
    return measure_tpu.estimated_cycles(found[0].read_text()) if found else 0.0

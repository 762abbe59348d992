"""The figures that were found last time, kept in the repository, so that a change that costs something is seen.

Figures move with the compiler, so each set is filed under the versions that it was made with, and compared with
figures of the same versions only.

    {"jax 0.12.0.1, libtpu 0.0.50.1": {"mosaic_tpu/add/f32 4096x4096/tpu-v6e": {"add_tiles": {"bundles": 299}}}}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from opmux.certify import targets
from opmux.certify.results import CompileResult, Regression
from opmux.core.errors import SettingError

COMMITTED = Path(__file__).with_name("baseline.json")
"""The baseline of opmux's own backends."""

PROGRAM = "program"
"""Stands in place of a kernel's name for figures of the whole program."""

TOLERANCES: tuple[tuple[str, float], ...] = (
    (r"spills|fills|(fixed_)?spill_\w+|local_bytes|stack_bytes|LDL|STL|narrow_global", 0.0),
    (r"(fixed_)?registers|threads|barriers|smem_\w+|vmem_bytes|hbm_bytes", 0.0),
    (r"estimate|estimated_cycles|bundle_cycles", 0.02),
    (r"bundles(@\d+)?", 0.02),
    (r"\w+(@\d+)?", 0.05),
)
"""By how much of the baseline a figure may be worse: the first pattern that matches its whole name."""

USES = ("wgmma", "tcgen05_mma", "tma_loads", "tma_stores", "HGMMA", "QGMMA", "UTCHMMA", "UTMALDG", "UTMASTG", "mxu")
"""Units that a kernel is meant to use: more of these is no worse, but none at all is."""

Figures = dict[str, float]
Section = dict[str, dict[str, Figures]]
"""By `CompileResult.key`, figures by kernel."""


def tolerance(figure: str) -> float:
    """By how much of the baseline a figure may be worse."""
    return next(allowed for pattern, allowed in TOLERANCES if re.fullmatch(pattern, figure))


def version_key(target: str, versions: Mapping[str, str]) -> str:
    """The versions that the figures of a target depend on, as text."""
    if targets.target(target).platform == "tpu":
        wanted = {"jax": "jax", "libtpu": "libtpu"}
    else:
        ptxas = next((name for name in versions if name.startswith("nvidia-cuda-nvcc")), "nvidia-cuda-nvcc")
        wanted = {"jax": "jax", "ptxas": ptxas}
    return ", ".join(f"{name} {versions.get(found, '(none)')}" for name, found in wanted.items())


class Baseline:
    """Figures of earlier runs, by versions."""

    def __init__(self, sections: Mapping[str, Section]):
        self.sections = {versions: dict(section) for versions, section in sections.items()}

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Reads a file; one that does not exist is empty.

        Raises:
          SettingError: it is no baseline.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls({})
        except (OSError, ValueError) as error:
            raise SettingError(f"baseline {path}: {error}") from None
        if not _is_baseline(found):
            raise SettingError(f"baseline {path}: no file that --update-baseline has written")
        return cls(found)

    def write(self, path: Path) -> None:
        """Writes a file that differs by line where figures differ."""
        lines = ["{"]
        for at, (versions, section) in enumerate(sorted(self.sections.items())):
            rows = [f"  {json.dumps(key)}: {json.dumps(_whole(section[key]))}" for key in sorted(section)]
            comma = "," if at + 1 < len(self.sections) else ""
            lines += [f" {json.dumps(versions)}: {{", ",\n".join(rows), f" }}{comma}"]
        path.write_text("\n".join([*lines, "}"]) + "\n", encoding="utf-8")

    def of(self, result: CompileResult, versions: Mapping[str, str]) -> dict[str, Figures] | None:
        """Figures of an earlier run of the same program by the same versions, by kernel; None if there are none."""
        return self.sections.get(version_key(result.target, versions), {}).get(result.key)

    def unknown(self, results: Iterable[CompileResult], versions: Mapping[str, str]) -> list[str]:
        """The versions among those of the results that there is nothing of."""
        found = dict.fromkeys(version_key(result.target, versions) for result in results)
        return [key for key in found if key not in self.sections]

    def regressions(self, results: Iterable[CompileResult], versions: Mapping[str, str]) -> list[Regression]:
        """What got worse by more than its tolerance."""
        found: list[Regression] = []
        for result in results:
            old = self.of(result, versions)
            if old is None:
                continue
            if result.status != "ok":
                found.append(_worse(result, PROGRAM, "compiles", 1.0, 0.0))
                continue
            new = figures_of(result)
            found += [_worse(result, kernel, "present", 1.0, 0.0) for kernel in old if kernel not in new]
            for kernel, figures in new.items():
                found += [
                    _worse(result, kernel, name, old[kernel][name], value)
                    for name, value in figures.items()
                    if kernel in old and name in old[kernel] and is_worse(name, old[kernel][name], value)
                ]
        return found

    def update(self, results: Iterable[CompileResult], versions: Mapping[str, str]) -> None:
        """Takes the figures of all results that compiled in place of earlier ones."""
        for result in results:
            section = self.sections.setdefault(version_key(result.target, versions), {})
            if result.status == "ok":
                section[result.key] = figures_of(result)
            else:
                section.pop(result.key, None)
        self.sections = {key: section for key, section in self.sections.items() if section}


def figures_of(result: CompileResult) -> dict[str, Figures]:
    """Every figure of a result that is compared, by kernel."""
    program: Figures = {"hbm_bytes": result.hbm_bytes}
    if result.estimate is not None:
        program["estimate"] = result.estimate.seconds
    return {PROGRAM: program} | {kernel.kernel: dict(kernel.figures) for kernel in result.kernels}


def is_worse(figure: str, old: float, new: float) -> bool:
    """Whether a figure is worse by more than its tolerance."""
    if figure in USES:
        return old > 0 and new == 0
    return new > old * (1 + tolerance(figure)) + 1e-12


def _worse(result: CompileResult, kernel: str, figure: str, old: float, new: float) -> Regression:
    return Regression(
        key=result.key, kernel=kernel, figure=figure, baseline=old, found=new, tolerance=tolerance(figure)
    )


def _is_baseline(found: object) -> bool:
    return isinstance(found, dict) and all(
        isinstance(figures, dict) and all(isinstance(value, int | float) for value in figures.values())
        for section in found.values()
        for kernels in (section.values() if isinstance(section, dict) else [None])
        for figures in (kernels.values() if isinstance(kernels, dict) else [None])
    )


def _whole(kernels: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """The figures with integers as such, in order."""
    return {
        kernel: {name: int(value) if value == int(value) else value for name, value in sorted(figures.items())}
        for kernel, figures in sorted(kernels.items())
    }

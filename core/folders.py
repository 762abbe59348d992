"""Where opmux keeps files between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$OPMUX_CACHE`, or the folder `opmux` in the user's cache folder."""
    if chosen := os.environ.get("OPMUX_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "opmux"

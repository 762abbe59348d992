"""The built-in ops, one file each."""

from __future__ import annotations

import importlib
from functools import cache
from types import MappingProxyType

from opmux.core.op import Op

_NAMES = ("add", "attention", "chunk_fwd_h", "matmul", "reduce")


@cache
def builtin_ops() -> MappingProxyType[str, Op]:
    """Every built-in op by name."""
    return MappingProxyType({name: importlib.import_module(f"opmux.core.ops.{name}").OP for name in _NAMES})

"""What is to be compiled: an op's implementation on a workload, for a target."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from pydantic import BaseModel, ConfigDict

from opmux.core.errors import SettingError
from opmux.core.request import short_dtype


class _Spec(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Workload(_Spec):
    """Arguments of an op, as abstract arrays: what a compiler needs to know of a call.

    Attributes:
      name: unique among the workloads of the op.
      args: array arguments by the op's parameter names: `bf16[2,1024,8,128]`, or a list of whole numbers for an
        int32 array whose values decide shapes (`cu_seqlens`).
      params: further arguments. Lists stand for tuples.
      wanted: for the backward: operands whose cotangents are needed; empty means all.
      allowed_spills: by target or platform, stores to and loads from spill slots that do not count as a failure. Only
        where no better kernel is known for that target; the baseline still holds the number.
      estimate: ask the compiler for its own cycle estimate, where it has one.
      variant: compiled for the main target of each platform only, unless targets are named: on the others it is
        expected to do as those do that it is a variant of.
    """

    name: str
    args: dict[str, str | tuple[int, ...]]
    params: dict[str, Any] = {}
    wanted: tuple[str, ...] = ()
    allowed_spills: dict[str, int] = {}
    estimate: bool = True
    variant: bool = False


class CompileJob(_Spec):
    """One implementation to compile for one target.

    Attributes:
      backend: name of the backend.
      op: name of the op, or of its backward (`attention_vjp`).
      workload: the arguments.
      target: name of the device; see `targets.TARGETS`.
      config: fields that override the kernel's default config.
      dump: folder that dumped texts are kept in; empty keeps none.
      plugins: modules to register as plugins in the child, besides those of entry points.
    """

    backend: str
    op: str
    workload: Workload
    target: str
    config: dict[str, Any] = {}
    dump: str = ""
    plugins: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """As `CompileResult.key`."""
        return f"{self.backend}/{self.op}/{self.workload.name}/{self.target}"


def abstract(text: str) -> jax.ShapeDtypeStruct:
    """The abstract array that `bf16[2,1024]` or `bfloat16[2,1024]` describes; the inverse of `str(ArraySpec)`.

    Raises:
      SettingError: the text describes none.
    """
    match = re.fullmatch(r"(\w+)\[((?:\d+(?:,\d+)*)?)\]", text.replace(" ", ""))
    if match is None:
        raise SettingError(f"{text!r}; allowed: a dtype and dimensions such as bf16[2,1024,8,128] or f32[]")
    try:
        dtype = np.dtype(_LONG.get(match[1], match[1]))
    except TypeError:
        raise SettingError(f"{text!r}: unknown dtype {match[1]!r}") from None
    return jax.ShapeDtypeStruct(tuple(map(int, match[2].split(","))) if match[2] else (), dtype)


_LONG = {
    short_dtype(np.dtype(name)): name
    for name in (
        "bool", "bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16",
        "uint32", "uint64", "complex64", "complex128",
    )
} | {f"f8{kind}": f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3b11fnuz")}  # fmt: skip

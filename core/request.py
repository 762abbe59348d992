"""What an implementation is asked: shapes, dtypes and parameters, but no values.

A `Request` is hashable and holds no array, so it can key caches, cross threads, and describe a call for
a device that is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

Operands = Mapping[str, jax.Array]
"""Canonical arrays by name; an operand that was not given is absent."""

Outputs = dict[str, jax.Array]


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape and dtype of one array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @classmethod
    def of(cls, array: Any) -> ArraySpec:
        """The spec of an array, a tracer or a `jax.ShapeDtypeStruct`."""
        return cls(tuple(array.shape), np.dtype(array.dtype))

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{short_dtype(self.dtype)}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Request:
    """One call of an op in its canonical layout.

    Attributes:
      op: name of the op; the backward of an op is the op `<name>_vjp`.
      operands: `(name, spec)` pairs in the op's order; operands that were not given are absent.
      params: the op's own frozen dataclass of static parameters.
      wanted: names of the results that are needed. A forward wants its outputs; a backward wants the
        cotangents of the operands that are being differentiated.
      manual_axes: the call is traced inside `shard_map` with its replication checks on.
    """

    op: str
    operands: tuple[tuple[str, ArraySpec], ...]
    params: Any
    wanted: tuple[str, ...]
    manual_axes: bool = False

    def __contains__(self, name: str) -> bool:
        return any(name == known for known, _ in self.operands)

    def __getitem__(self, name: str) -> ArraySpec:
        for known, spec in self.operands:
            if known == name:
                return spec
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.operands)

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The operands as abstract arrays, for `jax.eval_shape`."""
        return {name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for name, spec in self.operands}

    def __str__(self) -> str:
        operands = "  ".join(f"{name} {spec}" for name, spec in self.operands)
        return f"{self.op}  {operands}  {self.params}"


_SHORT = {"bfloat16": "bf16", "bool": "bool"}
_PREFIXES = {"f": "f", "i": "s", "u": "u", "c": "c"}


def short_dtype(dtype: Any) -> str:
    """`bf16` for bfloat16, `f32` for float32, `s8` for int8: the names HLO prints."""
    dtype = np.dtype(dtype)
    if dtype.name in _SHORT:
        return _SHORT[dtype.name]
    if dtype.kind in _PREFIXES:
        return f"{_PREFIXES[dtype.kind]}{dtype.itemsize * 8}"
    return dtype.name

"""A test case: a name and a recipe for arguments, independent of any backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Build = Callable[[np.random.Generator], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Case:
    """One call of an op.

    Attributes:
      name: unique within the op; the test id.
      build: makes `(args, kwargs)` of NumPy arrays in their final dtypes from a generator.
      grad: whether gradients of the case are checked too (by finite differences of the float64 oracle).
      rtol: relative tolerance in place of the one of the output's dtype, where the case has a reason.
      source: public report that the case stands for, such as `pytorch#103963`.
      transforms: whether the case also runs under every transform; for a few small ones an op.
      long: whether it has thousands of steps, each of which takes a simulator of a device as long as a whole case.
    """

    name: str
    build: Build
    grad: bool = True
    rtol: float | None = None
    source: str = ""
    transforms: bool = False
    long: bool = False

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, the same ones every time."""
        seed = np.frombuffer(self.name.encode(), np.uint8)
        return self.build(np.random.default_rng(seed))

"""The Pallas TPU kernels inside a traced program, each to be compiled alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class PallasCall:
    """One kernel of a program.

    Attributes:
      name: what the kernel is called.
      equation: its equation in the program's jaxpr.
      steps: grid points; None if the grid is not static.
      data_dependent: whether branches or loop bounds inside depend on scalars that are data: the compiler's cycle
        estimate, which knows no data, means nothing then.
    """

    name: str
    equation: Any
    steps: int | None
    data_dependent: bool

    def alone(self, sharding: Any) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
        """The kernel as a function of its own, and its abstract operands."""

        def function(*operands: Any) -> Any:
            return self.equation.primitive.bind(*operands, **self.equation.params)

        function.__name__ = self.name  # dumps are named after it
        avals = [variable.aval for variable in self.equation.invars]
        return function, [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) for aval in avals]


def pallas_calls(jaxpr: Any) -> Iterator[PallasCall]:
    """Every Pallas call of a jaxpr, in program order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            grid = equation.params["grid_mapping"].grid
            static = all(isinstance(size, int) for size in grid)
            inner = equation.params["jaxpr"]
            scalars = [_in_smem(variable) for variable in inner.invars]
            steps = math.prod(grid) if static else None
            yield PallasCall(_name(equation), equation, steps, _branches_on(inner, scalars))
        else:
            for inner in inner_jaxprs(equation):
                yield from pallas_calls(inner)


def _name(equation: Any) -> str:
    # XLA calls a kernel that has no name after the scope around it, in letters that it takes.
    scope = str(equation.source_info.name_stack).split("/")[-1]
    return str(equation.params["name"] or re.sub(r"[^\w.-]", "_", scope) or "pallas_call")


def inner_jaxprs(equation: Any) -> Iterator[Any]:
    """Jaxprs among the parameters of an equation."""
    for value in equation.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            found = getattr(each, "jaxpr", each)
            if hasattr(found, "eqns"):
                yield found


def _in_smem(variable: Any) -> bool:
    # Semaphores are of no concern, and program ids are no operands.
    return "smem" in str(variable.aval).lower()


def _branches_on(jaxpr: Any, marked: Sequence[bool]) -> bool:
    """Whether control flow in a jaxpr depends on marked inputs."""
    tainted = {id(variable) for variable, mark in zip(jaxpr.invars, marked, strict=True) if mark}
    for equation in jaxpr.eqns:
        marks = [id(variable) in tainted for variable in equation.invars]
        if not any(marks):
            continue
        name = equation.primitive.name
        if name == "cond" and marks[0]:
            return True
        if name == "while" and any(
            mark and not _is_reference(variable) for mark, variable in zip(marks, equation.invars, strict=True)
        ):
            return True
        operands = marks[1:] if name == "cond" else marks
        for inner in inner_jaxprs(equation):
            # Where operands and inner variables are not one to one, anything marked marks them all.
            inside = operands if len(operands) == len(inner.invars) else [True] * len(inner.invars)
            if _branches_on(inner, inside):
                return True
        tainted |= {id(variable) for variable in equation.outvars}
    return False


def _is_reference(variable: Any) -> bool:
    return "ref" in type(variable.aval).__name__.lower() or str(variable.aval).startswith("Ref")

"""`add`: elementwise addition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.check import Checker
from opmux.core.op import Call, Cost, Op, make_request
from opmux.core.ops.dense import numeric, promote, set_weak_type
from opmux.core.request import ArraySpec, Operands, Outputs, Request

if TYPE_CHECKING:
    from jaxtyping import Array, Shaped


@dataclass(frozen=True, slots=True)
class AddParams:
    """A canonical addition has no parameters: the operands say it all."""


def canonicalize(x: Shaped[Array, "*#S"], y: Shaped[Array, "*#S"]) -> Any:
    """Elementwise sum `x + y`, as `jnp.add`.

    Integers wrap around on overflow and booleans combine by logical or. The dtype, and whether the result is
    weakly typed, follow JAX's promotion rules: a Python scalar does not widen an array.

    Args:
      x: an array or scalar of any numeric or boolean dtype.
      y: likewise; its shape broadcasts with the one of `x`.

    Returns:
      The sum, in the broadcast shape and the promoted dtype.

    Raises:
      ArgumentError: the shapes do not broadcast, or an argument is no numeric array.
    """
    check = Checker("add")
    x, y = numeric(check, "x", x), numeric(check, "y", y)
    dtype, weak = promote(check, ("x", "y"), x, y)
    rank = max(x.ndim, y.ndim)
    operands: dict[str, Any] = {}
    for name, array in (("x", x), ("y", y)):
        if array.ndim < rank:
            array = lax.expand_dims(array, range(rank - array.ndim))
        operands[name] = array if array.dtype == dtype else lax.convert_element_type(array, dtype)
    pairs = zip(operands["x"].shape, operands["y"].shape, strict=True)
    if any(m != n and 1 not in (m, n) for m, n in pairs):
        raise check.error("y", f"shape {y.shape}", f"a shape that broadcasts with the shape of 'x', {x.shape}")

    def finish(outputs: Outputs) -> Any:
        return set_weak_type(outputs["out"]) if weak else outputs["out"]

    return Call(make_request("add", operands, AddParams(), ("out",)), operands, finish)


def outputs(request: Request) -> dict[str, ArraySpec]:
    """`out` in the broadcast shape of the operands, in their dtype."""
    x, y = request["x"], request["y"]
    return {"out": ArraySpec(np.broadcast_shapes(x.shape, y.shape), x.dtype)}


def reference(request: Request, operands: Operands) -> Outputs:
    """The specification."""
    return {"out": jnp.add(operands["x"], operands["y"])}


def cost(request: Request) -> Cost:
    """One addition for each element of the output."""
    out = outputs(request)["out"]
    return Cost(flops=out.size, bytes=request["x"].nbytes + request["y"].nbytes + out.nbytes)


def _cases() -> Any:
    from opmux.core.cases.add import cases

    return cases()


OP = Op(
    name="add",
    canonicalize=canonicalize,
    outputs=outputs,
    reference=reference,
    cost=cost,
    differentiable=("x", "y"),
    cases=_cases,
)

"""`reduce`: sums, means, products and extrema over axes."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.check import Checker
from opmux.core.errors import near_matches
from opmux.core.op import Call, Cost, Op, make_request
from opmux.core.ops.dense import accumulator, numeric, requested_dtype
from opmux.core.request import ArraySpec, Operands, Outputs, Request

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Array, Shaped

Kind = Literal["sum", "mean", "max", "min", "prod"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class ReduceParams:
    """Static parameters of a canonical reduction.

    Attributes:
      kind: which reduction.
      acc: dtype that elements are converted to before they are combined, and partial results are held in.
      dtype: dtype of the output.
    """

    kind: Kind
    acc: np.dtype[Any]
    dtype: np.dtype[Any]


def canonicalize(
    x: Shaped[Array, "..."],
    *,
    kind: str = "sum",
    axis: int | tuple[int, ...] | None = None,
    keepdims: bool = False,
    dtype: DTypeLike | None = None,
) -> Any:
    """Sum, mean, maximum, minimum or product over axes, as `jnp.sum` and its kin.

    Floats of 16 bits and fewer accumulate in float32 and are rounded once. Integers narrower than JAX's default
    integer widen to it in sums and products, booleans count; means of integers are floats. NaN propagates. Over
    an empty axis a sum is 0, a product 1 and a mean NaN.

    Args:
      x: an array or scalar of any numeric or boolean dtype.
      kind: 'sum', 'mean', 'max', 'min' or 'prod'.
      axis: axes to reduce: an int or several, negative ones count from the end; None for all; () for none.
      keepdims: keep the reduced axes with length 1.
      dtype: dtype of the result. Sums, means and products convert the elements to it first (to float32, if it is
        a shorter float), so that a sum in bool tells whether any element is true; a maximum or minimum is
        converted after it was found.

    Returns:
      The reduced array.

    Raises:
      ArgumentError: an axis, kind or dtype is not allowed, or a maximum or minimum would be over an empty axis.
    """
    check = Checker("reduce")
    x = numeric(check, "x", x)
    known = _kind(check, kind)
    axes = _axes(check, axis, x.ndim)
    keepdims = check.boolean("keepdims", keepdims)
    empty = [number for number in axes if x.shape[number] == 0]
    if empty and known in ("max", "min"):
        raise check.error("x", f"shape {x.shape}, empty along axis {empty[0]}", f"a non-empty axis for a {known}")
    acc, out_dtype = _dtypes(check, known, np.dtype(x.dtype), dtype)

    kept = [number for number in range(x.ndim) if number not in axes]
    # Axes of length 1 have no place in memory: the others alone decide whether a reshape is enough.
    long = [number for number in axes if x.shape[number] != 1]
    if long and any(long[0] < number < long[-1] and x.shape[number] != 1 for number in kept):
        canonical = lax.transpose(x, (*kept, *axes))
        before, after = kept, []
    else:
        canonical = x
        first = long[0] if long else x.ndim
        before = [number for number in kept if number < first]
        after = [number for number in kept if number > first]
    A, R, B = (math.prod(x.shape[number] for number in group) for group in (before, axes, after))
    operands: dict[str, Any] = {"x": canonical.reshape(A, R, B)}
    shape = tuple(
        1 if number in axes else size for number, size in enumerate(x.shape) if keepdims or number not in axes
    )

    def finish(outputs: Outputs) -> Any:
        return outputs["out"].reshape(shape)

    return Call(make_request("reduce", operands, ReduceParams(known, acc, out_dtype), ("out",)), operands, finish)


def _kind(check: Checker, kind: Any) -> Kind:
    for known in KINDS:
        if isinstance(kind, str) and kind == known:
            return known
    near = near_matches(kind, KINDS) if isinstance(kind, str) else []
    hint = f"Did you mean {near[0]!r}?" if near else ""
    allowed = ", ".join(map(repr, KINDS))
    raise check.error("kind", repr(kind), allowed, hint, type_=not isinstance(kind, str))


def _axes(check: Checker, axis: Any, rank: int) -> tuple[int, ...]:
    """The axes in ascending order, counted from the front."""
    if axis is None:
        return tuple(range(rank))
    found: list[int] = []
    for each in _listed(axis):
        try:
            number = None if isinstance(each, bool | np.bool_) else operator.index(each)
        except TypeError:  # also raised by a traced value
            number = None
        if number is None:
            raise check.error("axis", repr(axis), "an int, a tuple of ints, or None for all axes", type_=True)
        if not -rank <= number < rank:
            raise check.error(
                "axis", str(number), f"-{rank} to {rank - 1} for an array of {rank} axes" if rank else "()"
            )
        found.append(number % rank)
    if len(set(found)) != len(found):
        raise check.error("axis", repr(axis), "each axis once")
    return tuple(sorted(found))


def _listed(axis: Any) -> list[Any]:
    return list(axis) if isinstance(axis, tuple | list | np.ndarray) and np.ndim(axis) == 1 else [axis]


def _dtypes(check: Checker, kind: Kind, given: np.dtype[Any], dtype: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The dtypes of accumulation and result."""
    asked = None if dtype is None else requested_dtype(check, "dtype", dtype)
    if kind in ("max", "min"):
        return given, asked or given
    if kind == "mean":
        if asked is not None and asked.kind == "b":
            raise check.error("dtype", "bool for a mean", "an integer, floating or complex dtype", type_=True)
        out = asked or _inexact(given)
    else:
        out = asked or _widened(given)
    return accumulator(out), out


def _inexact(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Float64 for 64-bit integers and float32 for other integers and booleans; else the same dtype."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return dtype
    return np.dtype(np.float64 if dtype.itemsize == 8 else np.float32)


def _widened(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """JAX's default integer of the same signedness for booleans and narrower integers; else the same dtype."""
    wide = np.dtype(jnp.result_type(int))
    if dtype.kind == "b":
        return wide
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < wide.itemsize * 8:
        return np.dtype(f"u{wide}") if jnp.issubdtype(dtype, jnp.unsignedinteger) else wide
    return dtype


def outputs(request: Request) -> dict[str, ArraySpec]:
    """`out` [A, B] for an `x` of [A, R, B]."""
    A, _, B = request["x"].shape
    return {"out": ArraySpec((A, B), request.params.dtype)}


def reference(request: Request, operands: Operands) -> Outputs:
    """The specification: the middle axis reduced by `jax.numpy`."""
    params: ReduceParams = request.params
    x = operands["x"]
    if params.kind == "max":
        out = jnp.max(x, axis=1)
    elif params.kind == "min":
        out = jnp.min(x, axis=1)
    else:
        accumulate = {"sum": jnp.sum, "mean": jnp.mean, "prod": jnp.prod}[params.kind]
        out = accumulate(x, axis=1, dtype=params.acc)
    return {"out": out.astype(params.dtype)}


def cost(request: Request) -> Cost:
    """One operation for each element."""
    x = request["x"]
    return Cost(flops=x.size, bytes=x.nbytes + outputs(request)["out"].nbytes)


def _cases() -> Any:
    from opmux.core.cases.reduce import cases

    return cases()


OP = Op(
    name="reduce",
    canonicalize=canonicalize,
    outputs=outputs,
    reference=reference,
    cost=cost,
    static=("kind", "axis", "keepdims", "dtype"),
    differentiable=("x",),
    cases=_cases,
)

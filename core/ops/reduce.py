"""`reduce`: sums, means, products and extrema over axes.

The canonical operand is a view of the argument, never a transposed copy: its odd axes are reduced and its even
ones kept. Axes next to one another are merged, so almost every call is [A, R, B], and the result is [A, B]. Reduced
axes that lie apart give [A, R, B, R', C] and so on.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax.numpy as jnp
import numpy as np

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

    operands: dict[str, Any] = {"x": x.reshape(_alternating(x.shape, axes))}
    shape = tuple(
        1 if number in axes else size for number, size in enumerate(x.shape) if keepdims or number not in axes
    )

    def finish(outputs: Outputs) -> Any:
        return outputs["out"].reshape(shape)

    return Call(make_request("reduce", operands, ReduceParams(known, acc, out_dtype), ("out",)), operands, finish)


_LANES = 128


def _alternating(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with runs of neighbouring axes merged, so that kept and reduced axes take turns.

    The first and the last axis are kept ones. Axes of length 1 have no place in memory and part no run. A long last
    axis that is reduced joins no run: a TPU, whose registers lie along it, would have to move every element first.
    """
    sizes = [1]
    last = max((number for number, size in enumerate(shape) if size != 1), default=-1)
    for number, size in enumerate(shape):
        if size != 1:
            at_reduced = len(sizes) % 2 == 0
            if at_reduced != (number in axes):
                sizes.append(1)
            elif at_reduced and number == last and size >= _LANES:
                sizes += [1, 1]
            sizes[-1] *= size
    sizes += [1, 1] if len(sizes) == 1 else [1] * (len(sizes) % 2 == 0)
    return tuple(sizes)


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


def reduced_axes(rank: int) -> tuple[int, ...]:
    """The axes that a canonical reduction reduces: the odd ones."""
    return tuple(range(1, rank, 2))


def outputs(request: Request) -> dict[str, ArraySpec]:
    """`out` [A, B, ...] for an `x` of [A, R, B, ...]."""
    return {"out": ArraySpec(request["x"].shape[::2], request.params.dtype)}


def reference(request: Request, operands: Operands) -> Outputs:
    """The specification: the odd axes reduced by `jax.numpy`."""
    params: ReduceParams = request.params
    x = operands["x"]
    axes = reduced_axes(x.ndim)
    if params.kind == "max":
        out = jnp.max(x, axis=axes)
    elif params.kind == "min":
        out = jnp.min(x, axis=axes)
    else:
        accumulate = {"sum": jnp.sum, "mean": jnp.mean, "prod": jnp.prod}[params.kind]
        out = accumulate(x, axis=axes, dtype=params.acc)
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

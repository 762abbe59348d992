"""`matmul`: matrix products with batching and broadcasting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from opmux.core.check import Checker
from opmux.core.errors import near_matches
from opmux.core.op import Call, Cost, Op, make_request
from opmux.core.ops.dense import numeric, promote, requested_dtype, set_weak_type
from opmux.core.request import ArraySpec, Operands, Outputs, Request

if TYPE_CHECKING:
    from jax.typing import DTypeLike
    from jaxtyping import Array, Shaped

Precision = tuple[lax.Precision, lax.Precision] | lax.DotAlgorithm | lax.DotAlgorithmPreset | None

_NAMES = ("default", "fastest", "bfloat16", "high", "bfloat16_3x", "tensorfloat32", "highest", "float32")
_ALLOWED = "None, 'default', 'high', 'highest', a lax.Precision, a pair of these, or a lax.DotAlgorithmPreset"


@dataclass(frozen=True, slots=True)
class MatmulParams:
    """Static parameters of a canonical matrix product.

    Attributes:
      precision: one precision for each operand, a dot algorithm, or None for the platform's default.
      dtype: dtype of the output. Sums of 16-bit floats accumulate in float32 and are rounded to it once.
    """

    precision: Precision
    dtype: np.dtype[Any]


def canonicalize(
    a: Shaped[Array, "*#B M K"],
    b: Shaped[Array, "*#B K N"],
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> Any:
    """Matrix product `a @ b`, as `jnp.matmul`.

    Leading axes are batch axes and broadcast. A one-dimensional `a` is a row and a one-dimensional `b` a
    column, whose added axis is dropped from the result. Floats of 16 bits accumulate in float32 and are rounded
    once. Integers wrap around in the result's dtype: ask for `preferred_element_type=jnp.int32` to get exact
    products of int8. A sum over K = 0 terms is 0.

    Args:
      a: [*B, M, K] or [K], any numeric or boolean dtype.
      b: [*B, K, N] or [K].
      precision: how float32 products are computed where the hardware offers a choice: None (the setting of
        `jax.default_matmul_precision`), 'default', 'high', 'highest', a `lax.Precision`, a pair of these for the
        two operands, or a `lax.DotAlgorithmPreset`. 'highest' is accurate to 5e-6 relative.
      preferred_element_type: dtype of the result; by default the promoted dtype of the operands.

    Returns:
      The product, [*B, M, N].

    Raises:
      ArgumentError: a rank, shape, dtype or precision is not allowed.
    """
    check = Checker("matmul")
    a, b = numeric(check, "a", a), numeric(check, "b", b)
    for name, array in (("a", a), ("b", b)):
        if array.ndim == 0:
            raise check.error(name, "a scalar", "an array of at least one axis", "A scalar factor is multiplied by *.")
    common, weak = promote(check, ("a", "b"), a, b)
    drop = tuple(axis for axis, array in ((-2, a), (-1, b)) if array.ndim == 1)
    left = a if a.ndim > 1 else lax.expand_dims(a, (0,))
    right = b if b.ndim > 1 else lax.expand_dims(b, (1,))
    if left.shape[-1] != right.shape[-2]:
        raise check.error(
            "b",
            f"shape {b.shape}, which has {right.shape[-2]} rows",
            f"{left.shape[-1]} rows for an `a` of shape {a.shape}",
        )
    rank = max(left.ndim, right.ndim)
    operands: dict[str, Any] = {}
    for name, array in (("a", left), ("b", right)):
        if array.ndim < rank:
            array = lax.expand_dims(array, range(rank - array.ndim))
        operands[name] = array if array.dtype == common else lax.convert_element_type(array, common)
    pairs = zip(operands["a"].shape[:-2], operands["b"].shape[:-2], strict=True)
    if any(m != n and 1 not in (m, n) for m, n in pairs):
        raise check.error("b", f"shape {b.shape}", f"batch axes that broadcast with the ones of `a`, shape {a.shape}")

    dtype = common
    if preferred_element_type is not None:
        weak = False
        dtype = _preferred(check, preferred_element_type, common)
    params = MatmulParams(_precision(check, precision), dtype)

    def finish(outputs: Outputs) -> Any:
        out = outputs["out"]
        out = lax.squeeze(out, [out.ndim + axis for axis in drop]) if drop else out
        return set_weak_type(out) if weak else out

    return Call(make_request("matmul", operands, params, ("out",)), operands, finish)


def _preferred(check: Checker, value: Any, common: np.dtype[Any]) -> np.dtype[Any]:
    dtype = requested_dtype(check, "preferred_element_type", value)
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    have, want = (
        sum(jnp.issubdtype(each, kind) * order for order, kind in enumerate(kinds, 1)) for each in (common, dtype)
    )
    narrower = have == want == 1 and jnp.iinfo(dtype).bits < jnp.iinfo(common).bits
    if want < have or narrower:
        raise check.error(
            "preferred_element_type", f"{dtype.name} for operands of dtype {common.name}",
            "the operands' kind of dtype or a wider kind (integer, floating, complex), not a shorter integer",
            "Convert the result with astype.", type_=True,
        )  # fmt: skip
    return dtype


def _precision(check: Checker, value: Any) -> Precision:
    """A precision in hashable form; None takes what `jax.default_matmul_precision` says."""
    if value is None:
        config: Any = jax.config
        value = config.jax_default_matmul_precision
    if value is None or isinstance(value, lax.DotAlgorithm | lax.DotAlgorithmPreset):
        return value
    if isinstance(value, lax.Precision):
        return value, value
    if isinstance(value, str):
        if value in _NAMES:
            return lax.Precision(value), lax.Precision(value)
        if value in lax.DotAlgorithmPreset.__members__:
            return lax.DotAlgorithmPreset[value]
        near = near_matches(value, (*_NAMES, *lax.DotAlgorithmPreset.__members__))
        raise check.error("precision", repr(value), _ALLOWED, f"Did you mean {near[0]!r}?" if near else "")
    if isinstance(value, tuple | list):
        sides = [_precision(check, side) for side in cast(list[Any], value) if isinstance(side, str | lax.Precision)]
        if len(sides) == len(cast(list[Any], value)) == 2:
            pair = [side[0] for side in sides if type(side) is tuple]
            if len(pair) == 2:
                return pair[0], pair[1]
    raise check.error("precision", repr(value), _ALLOWED, type_=True)


def outputs(request: Request) -> dict[str, ArraySpec]:
    """`out` [*B, M, N] in the dtype of the parameters."""
    a, b = request["a"].shape, request["b"].shape
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    return {"out": ArraySpec((*batch, a[-2], b[-1]), request.params.dtype)}


def reference(request: Request, operands: Operands) -> Outputs:
    """The specification. XLA accumulates 16-bit floats in float32 on every platform."""
    params: MatmulParams = request.params
    out = dot(operands["a"], operands["b"], params.precision, sum_dtype(params.dtype))
    return {"out": out.astype(params.dtype)}


def sum_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """32 bits for shorter integers and booleans, else the same dtype.

    Sums that wrap around in 32 bits are right in the low ones too, and 32 bits are what hardware sums int8 in.
    """
    if dtype.kind == "b" or (jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 32):
        return np.dtype(np.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int32)
    return dtype


def dot(a: jax.Array, b: jax.Array, precision: Precision, dtype: np.dtype[Any]) -> jax.Array:
    """The product of two arrays of one dtype, [*Ba, M, K] and [*Bb, K, N], summed in `dtype`."""
    if not jnp.issubdtype(a.dtype, jnp.inexact):
        precision = None
        if a.dtype not in (jnp.int8, jnp.uint8):
            a, b = a.astype(dtype), b.astype(dtype)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=dtype)


def cost(request: Request) -> Cost:
    """One multiplication and one addition for each term of each element."""
    out = outputs(request)["out"]
    moved = request["a"].nbytes + request["b"].nbytes + out.nbytes
    return Cost(flops=2 * out.size * request["a"].shape[-1], bytes=moved)


def _cases() -> Any:
    from opmux.core.cases.matmul import cases

    return cases()


OP = Op(
    name="matmul",
    canonicalize=canonicalize,
    outputs=outputs,
    reference=reference,
    cost=cost,
    static=("precision", "preferred_element_type"),
    differentiable=("a", "b"),
    cases=_cases,
)

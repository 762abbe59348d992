"""Two primitives that turn what cannot be done into an opmux error at the moment it is asked for."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import jax
import jax.core
from jax.interpreters import ad, batching, mlir

from opmux.core.compat import Primitive
from opmux.core.errors import DifferentiationError, OpmuxError
from opmux.core.request import ArraySpec

# reverse_only(x): the identity, whose tangent may be transposed but never evaluated. A custom_vjp alone would
# say the same in JAX's words, without the op and without a backend that has a forward rule.
_reverse_only_p = Primitive("opmux_reverse_only")
_tangent_p = Primitive("opmux_tangent")


class Message(Hashable, Protocol):
    """The text of an error, made when it is raised."""

    def text(self) -> str:
        """The text."""
        ...


def reverse_only(array: jax.Array, message: Message) -> jax.Array:
    """The array itself; forward-mode differentiation through it raises `DifferentiationError`."""
    return _reverse_only_p.bind(array, message=message)


def _identity(array: Any, *, message: Message) -> Any:
    return array


def _jvp(primals: Any, tangents: Any, *, message: Message) -> tuple[Any, Any]:
    (primal,), (tangent,) = primals, tangents
    out = _reverse_only_p.bind(primal, message=message)
    if isinstance(tangent, ad.Zero):
        return out, tangent
    return out, _tangent_p.bind(tangent, message=message)


def _refuse(*_: Any, message: Message, **__: Any) -> Any:
    raise DifferentiationError(message.text())


def _batch(args: Any, dims: Any, *, message: Message) -> tuple[Any, Any]:
    return _reverse_only_p.bind(args[0], message=message), dims[0]


_reverse_only_p.def_impl(_identity)
_reverse_only_p.def_abstract_eval(_identity)
mlir.register_lowering(_reverse_only_p, lambda ctx, array, *, message: [array])
batching.primitive_batchers[_reverse_only_p] = _batch
ad.primitive_jvps[_reverse_only_p] = _jvp

_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(_identity)
mlir.register_lowering(_tangent_p, _refuse)
# What is transposed is never batched before; a batched tangent is on its way to being evaluated.
batching.primitive_batchers[_tangent_p] = _refuse
ad.deflinear2(_tangent_p, lambda cotangent, _, *, message: [cotangent])

# unavailable(): a branch of lax.platform_dependent that may be traced, but not lowered.
_unavailable_p = Primitive("opmux_unavailable")
_unavailable_p.multiple_results = True


def unavailable(outputs: Mapping[str, ArraySpec], error: OpmuxError) -> dict[str, jax.Array]:
    """Outputs of the given specs; lowering or running them raises the error."""
    avals = tuple(jax.core.ShapedArray(spec.shape, spec.dtype) for spec in outputs.values())
    return dict(zip(outputs, _unavailable_p.bind(avals=avals, error=error), strict=True))


def _raise_unavailable(*_: Any, error: OpmuxError, **__: Any) -> Any:
    raise fresh(error)


_unavailable_p.def_impl(_raise_unavailable)
_unavailable_p.def_abstract_eval(lambda *, avals, error: list(avals))
mlir.register_lowering(_unavailable_p, _raise_unavailable)


def fresh(error: OpmuxError) -> OpmuxError:
    """A copy to raise: one that is kept would gather tracebacks, and with them all that their frames hold."""
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied

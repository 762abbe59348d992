"""`vmap` of a kernel: the batch becomes part of the kernel's own batch where the op has one.

    vmap of q [size, B, T, N, H], unbatched bias [1, N, T, S]
        ─► one request with q [size * B, T, N, H], bias [1, N, T, S]
        ─► outputs [size * B, ...] ─► [size, B, ...]

Left to itself, JAX adds a grid axis to a Pallas call: one more loop around a kernel whose config was chosen for a
small batch. Where folding is not possible that is what happens, except for a batch of nothing: Pallas has no arrays
without elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from opmux.core.op import Op
from opmux.core.request import ArraySpec, Operands, Outputs, Request

Compute = Callable[[Request, Operands], Outputs]


def batchable(op: Op, compute: Compute, takes: Callable[[Request], bool]) -> Compute:
    """The computation, batched by folding.

    Args:
      op: the op that is computed.
      compute: computes `request.wanted` from operands.
      takes: whether `compute` takes a request of the same op with a larger batch.
    """

    def run(request: Request, operands: Operands) -> Outputs:
        specs = op.outputs(request)
        wanted = {name: specs[name] for name in request.wanted}

        @custom_vmap
        def call(operands: Operands) -> Outputs:
            return compute(request, operands)

        @call.def_vmap
        def batch(size: int, batched: list[dict[str, bool]], operands: Operands) -> tuple[Outputs, dict[str, bool]]:
            everywhere = dict.fromkeys(wanted, True)
            folded = _fold(op, request, batched[0], size, operands) if size else None
            if folded is not None and takes(folded[0]):
                found = run(*folded)
                return {name: array.reshape(size, -1, *array.shape[1:]) for name, array in found.items()}, everywhere
            axes = {name: 0 if has_batch else None for name, has_batch in batched[0].items()}
            return _each(lambda operands: compute(request, operands), wanted, axes, size)(operands), everywhere

        callable_call: Any = call
        return callable_call(operands)

    return run


def _fold(
    op: Op, request: Request, batched: Mapping[str, bool], size: int, operands: Operands
) -> tuple[Request, dict[str, jax.Array]] | None:
    """The request and operands with the batch folded into their leading axis, or None if that is not possible."""
    names = op.batch(request) if op.batch is not None else ()
    B = max((request[name].shape[0] for name in names), default=0)
    if B == 0 or any(has_batch and name not in names for name, has_batch in batched.items()):
        return None
    if any(name not in names or request[name].shape[0] != B for name in request.wanted if name in request):
        return None  # a cotangent that sums over the batch would sum over what is folded into it

    def folded(name: str) -> jax.Array:
        array, inner = operands[name], request[name].shape
        if name not in names or (not batched[name] and inner[0] != B):
            return array  # shared by all of the batch
        if not batched[name]:
            array = array[None]
        return jnp.broadcast_to(array, (size, B, *inner[1:])).reshape(size * B, *inner[1:])

    arrays = {name: folded(name) for name in request}
    specs = tuple((name, ArraySpec.of(array)) for name, array in arrays.items())
    return replace(request, operands=specs), arrays


def _each(
    function: Callable[[Operands], Outputs],
    specs: Mapping[str, ArraySpec],
    axes: Mapping[str, int | None],
    size: int,
) -> Callable[[Operands], Outputs]:
    """The function batched as JAX batches it, but never called for a batch of nothing, at any level."""
    wide = {name: ArraySpec((size, *spec.shape), spec.dtype) for name, spec in specs.items()}

    def once(operands: Operands) -> Outputs:
        if size == 0:
            return {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in wide.items()}
        return jax.vmap(function, in_axes=(dict(axes),))(operands)

    call = custom_vmap(once)

    @call.def_vmap
    def batch(outer: int, batched: list[dict[str, bool]], operands: Operands) -> tuple[Outputs, dict[str, bool]]:
        further = {name: 0 if has_batch else None for name, has_batch in batched[0].items()}
        return _each(once, wide, further, outer)(operands), dict.fromkeys(specs, True)

    callable_call: Any = call
    return callable_call

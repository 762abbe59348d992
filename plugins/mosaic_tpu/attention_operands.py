"""How the operands of an attention lie in HBM and come to VMEM, for the forward and the backward kernels.

Query rows lie along lanes and keys along sublanes, so a block of scores is `key [kv, H] @ query^T [H, q]`, a softmax
runs down sublanes, and what belongs to a row (its maximum, its log-sum-exp) is a vector of lanes:

    operand                     in HBM              block
    query, d_out, out           [B, N, H, T]        [H, q]
    key (value in backward)     [B, K, S, H]        [kv, H]
    value in forward            [B, K, Hv, S]       [Hv, kv]
    lse, delta, q_segments      [B, N or 1, 1, T]   [1, q]
    kv_segments                 [B, 1, S, 128]      [kv, 128]    one key a sublane, the same in all lanes
    bias, mask over T and S     [#B, #N, S, T]      [kv, q]
    bias, mask over S only      [#B, #N, S, 128]    [kv, 128]
    bias, mask over T at most   [#B, #N, 1, T]      [1, q]

Heads are axes of the grid and go through index maps: key/value heads are not repeated for the query heads that share
them, and an axis of length 1 of a bias or mask stays at its only block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from opmux.core import compat
from opmux.core.indices import Scalar
from opmux.core.request import Operands
from opmux.plugins.mosaic_tpu.attention_tiling import Tiling
from opmux.plugins.mosaic_tpu.dense_config import LANES


@dataclass(frozen=True)
class Placed:
    """An array, and the block of it that each step of the grid holds."""

    array: jax.Array
    spec: pl.BlockSpec


def working_dtype(dtype: Any) -> np.dtype[Any]:
    """The dtype of factors of products: bfloat16 stays, and what Mosaic cannot load is float32."""
    return np.dtype(dtype if dtype == jnp.bfloat16 else jnp.float32)


def queries(tiling: Tiling, array: jax.Array) -> Placed:
    """[B, T, N, C], with queries along lanes."""
    array = jnp.transpose(array, (0, 2, 3, 1))
    return Placed(array, query_spec(tiling, array.shape[2]))


def query_spec(tiling: Tiling, channels: int) -> pl.BlockSpec:
    """Blocks of [B, N, channels, T]."""
    return pl.BlockSpec(
        (None, None, channels, tiling.q), lambda b, h, g, i, j, *_: (b, h * tiling.G + g, 0, i)
    )  # fmt: skip


def keys(tiling: Tiling, array: jax.Array) -> Placed:
    """[B, S, K, C], with keys along sublanes."""

    def at(b: Scalar, h: Scalar, g: Scalar, i: Scalar, j: Scalar, *prefetched: Any) -> tuple[Scalar, ...]:
        return b, h, tiling.key_block(i, j, tiling.bounds(b, prefetched)), 0

    return Placed(jnp.transpose(array, (0, 2, 1, 3)), pl.BlockSpec((None, None, tiling.kv, array.shape[3]), at))


def keys_along_lanes(tiling: Tiling, array: jax.Array) -> Placed:
    """[B, S, K, C], with keys along lanes."""

    def at(b: Scalar, h: Scalar, g: Scalar, i: Scalar, j: Scalar, *prefetched: Any) -> tuple[Scalar, ...]:
        return b, h, 0, tiling.key_block(i, j, tiling.bounds(b, prefetched))

    return Placed(jnp.transpose(array, (0, 2, 3, 1)), pl.BlockSpec((None, None, array.shape[3], tiling.kv), at))


def rows(tiling: Tiling, array: jax.Array) -> Placed:
    """[B, T, N], one number a query row."""
    return Placed(jnp.transpose(array, (0, 2, 1))[:, :, None], query_spec(tiling, 1))


def masks(tiling: Tiling, operands: Operands) -> dict[str, Placed]:
    """The operands that decide who sees whom: `bias`, `mask` and segment ids, of the keys of the tiling."""
    found: dict[str, Placed] = {}
    if "bias" in operands:
        bias = operands["bias"]
        found["bias"] = _scores(tiling, bias.astype(working_dtype(bias.dtype)))
    if "mask" in operands:
        mask = operands["mask"]
        # Where it covers scores it is as small as can be; a row or a column of it is what vectors compare.
        both = mask.shape[2] > 1 and mask.shape[3] > 1
        found["mask"] = _scores(tiling, mask.astype(jnp.int8 if both else jnp.int32))
    if "q_segments" in operands:
        found["q_segments"] = _scores(tiling, operands["q_segments"][:, None, :, None])
        found["kv_segments"] = _scores(tiling, operands["kv_segments"][:, None, None, :])
    return found


def _scores(tiling: Tiling, array: jax.Array) -> Placed:
    """[#B, #N, #T, #S] transposed; along lanes it has T or, if that is 1, copies to fill a register."""
    b_size, n_size, t_size, s_size = array.shape
    column, row = t_size == 1 and s_size > 1, s_size == 1
    if not row:
        array = array[..., tiling.first_key : tiling.first_key + tiling.S]
    array = jnp.swapaxes(array, 2, 3)
    if column:
        array = jnp.broadcast_to(array, (b_size, n_size, tiling.S, LANES))
    elif row:
        array = jnp.broadcast_to(array, (b_size, n_size, 1, tiling.T))

    def at(b: Scalar, h: Scalar, g: Scalar, i: Scalar, j: Scalar, *prefetched: Any) -> tuple[Scalar, ...]:
        head = h * tiling.G + g
        block = 0 if row else tiling.key_block(i, j, tiling.bounds(b, prefetched))
        return b if b_size > 1 else 0, head if n_size > 1 else 0, block, 0 if column else i

    shape = (None, None, 1 if row else tiling.kv, LANES if column else tiling.q)
    return Placed(array, pl.BlockSpec(shape, at))


def call(
    kernel: Callable[..., None],
    tiling: Tiling,
    operands: Operands,
    placed: Mapping[str, Placed],
    outputs: Mapping[str, tuple[tuple[int, ...], Any, pl.BlockSpec]],
    scratch: Mapping[str, Any],
    *,
    grid: tuple[int, ...],
    semantics: tuple[Any, ...],
    vmem_limit_bytes: int,
    name: str,
) -> dict[str, jax.Array]:
    """Runs `kernel(prefetched refs, refs by name)` over a grid.

    Args:
      kernel: the body; its second argument holds inputs, outputs under `out_<name>`, and scratch memory.
      tiling: the tiling.
      operands: the operands of the request, from which lengths are read.
      placed: the inputs.
      outputs: shape, dtype and blocks of each output.
      scratch: scratch memory.
      grid: the grid.
      semantics: of its axes.
      vmem_limit_bytes: vector memory that the kernel may use.
      name: of the kernel.
    """
    prefetched = tiling.prefetched(operands)
    arrays = [*prefetched, *(each.array for each in placed.values())]
    arrays = [compat.vary_like(array, arrays) for array in arrays]
    names = [*placed, *(f"out_{output}" for output in outputs), *scratch]
    varying = jax.typeof(arrays[0]).manual_axis_type
    results = pl.pallas_call(
        lambda *refs: kernel(
            refs[: len(prefetched)], dict(zip(names, refs[len(prefetched) :], strict=True))
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid,
            in_specs=[each.spec for each in placed.values()],
            out_specs=[spec for _, _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[
            jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=varying) for shape, dtype, _ in outputs.values()
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=vmem_limit_bytes),
        name=name,
    )(*arrays)  # fmt: skip
    return dict(zip(outputs, results, strict=True))


def product(a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
    """Products of two matrices summed over an axis of each, in float32.

    The precision is set, whatever the default is: one pass for bfloat16, whose products are exact, and true float32
    for float32, whose default on a TPU is one pass of bfloat16.
    """
    precise = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((over[0],), (over[1],)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=precise, preferred_element_type=jnp.float32)


def with_channels(array: jax.Array) -> jax.Array:
    """The array with one channel of zeros if it has none: Pallas has no arrays without elements."""
    return array if array.shape[-1] else jnp.zeros((*array.shape[:-1], 1), array.dtype)

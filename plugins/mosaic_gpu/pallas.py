"""What the kernels of this backend share: how they are launched, and what a simulator cannot do."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from opmux.core import compat
from opmux.plugins.mosaic_gpu.capability import SWIZZLED_LINE

COMPUTE_WARPGROUPS = 2
MEMORY_WARPGROUP = COMPUTE_WARPGROUPS
"""The warpgroup that issues copies comes last."""

_LANES = 128


def launch(
    body: Callable[..., None], out: Any, *, name: str, grid: int | Mapping[str, int], scratch: Sequence[Any] = (),
    specialized: bool = False, warpgroups: int = 1, cluster: Mapping[str, int] | None = None, approx_math: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """A kernel of blocks, each of one warpgroup, or of several along the axis `wg`.

    Args:
      body: called with the operands, the outputs and the scratch.
      out: a `jax.ShapeDtypeStruct`, or a sequence of them for as many outputs.
      name: the kernel's name.
      grid: sizes of the axes of the grid by their names, the last one innermost; or the size of the only one, `cta`.
      scratch: shared memory and barriers.
      specialized: whether there are a memory warpgroup and compute warpgroups.
      warpgroups: how many there are otherwise.
      cluster: sizes of the axes of a cluster by their names. The grid counts clusters then.
      approx_math: whether `exp2`, `log` and their like may be the device's own instructions, good to 22 bits, but
        `tanh` to 11.
    """
    warpgroups = COMPUTE_WARPGROUPS + 1 if specialized else warpgroups
    threads: dict[str, Any] = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    axes = {"cta": grid} if isinstance(grid, int) else grid
    if cluster:
        threads |= {"cluster": tuple(cluster.values()), "cluster_names": tuple(cluster)}
    kernel = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=tuple(scratch),
        grid=tuple(axes.values()),
        grid_names=tuple(axes),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup, approx_math=approx_math
        ),
        **threads,
    )

    def call(*operands: jax.Array) -> Any:
        # Indices are 32-bit, whatever Python's integers become elsewhere.
        with jax.enable_x64(False):
            return kernel(*operands)

    return call


def swizzled(shape: Sequence[int], dtype: Any, most: int = SWIZZLED_LINE) -> Any:
    """Shared memory in swizzled tiles of eight rows, as `wgmma` reads them and TMA fills them without bank conflicts.

    Args:
      shape: [..., rows, columns]; the last axis is a multiple of 32 bytes.
      dtype: of the elements.
      most: bytes that a line is no longer than. A product over the rows takes a multiple of a line of them.
    """
    itemsize = np.dtype(dtype).itemsize
    line = math.gcd(shape[-1] * itemsize, most, SWIZZLED_LINE)
    transforms = (plgpu.TilingTransform((8, line // itemsize)), plgpu.SwizzleTransform(line))
    return plgpu.SMEM(tuple(shape), dtype, transforms=transforms)


def barriers(num_stages: int, num_arrivals: int) -> Any:
    """One barrier for each stage."""
    return plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_stages)


def count(first: jax.Array, stop: int, step: int) -> jax.Array:
    """How many numbers `first, first + step, …` lie below `stop`."""
    return lax.div(lax.max(stop - first, 0) + (step - 1), step)


def for_each(start: Any, stop: Any, body: Callable[[Any], None]) -> None:
    """Calls `body` with each number in turn."""

    def step(number: Any, carry: None) -> None:
        body(number)

    lax.fori_loop(start, stop, step, None)


def drain(empty: Any, num_copies: Any, num_stages: int) -> None:
    """Waits until the last stages were handed back: a warpgroup must see every phase of a barrier it waits on."""
    for_each(
        lax.max(num_copies - num_stages, 0),
        num_copies,
        lambda copy: plgpu.barrier_wait(empty.at[lax.rem(copy, num_stages)]),
    )


def load_tile(ref: Any, at: tuple[Any, ...]) -> jax.Array:
    """A part of device memory in registers, in whatever layout its use asks for.

    Where that is the layout of a product, the lanes that share a line read less than a sector of elements of 16 bits
    at a time; the rest is in the cache by then, but the compiler wants to be told. Older ones want it always.
    """
    if compat.in_gpu_simulator():
        return ref[at]
    if "idx" in inspect.signature(plgpu.load).parameters:
        return plgpu.load(ref, at, optimized=False)
    load: Any = plgpu.load
    return load(ref.at[at], optimized=False)


def wide(array: jax.Array, itemsize: int = 0) -> jax.Array:
    """The array, spread over a warpgroup in pieces of 16 bytes where it is long enough.

    Left to itself the compiler takes 8. A simulator has no registers, so there is nothing to spread.

    Args:
      array: a value in registers.
      itemsize: bytes of an element in the narrowest array that is spread in the same way; of this one's by default.
    """
    piece = min(16 // (itemsize or array.dtype.itemsize), array.size // _LANES)
    if compat.in_gpu_simulator() or array.size % (piece * _LANES):
        return array
    return plgpu.layout_cast(array, plgpu.Layout.WG_STRIDED(array.shape, piece))


def pad_to(array: jax.Array, shape: Sequence[int], fill: Any = 0) -> jax.Array:
    """The array, with `fill` at the end of each axis up to a shape."""
    short = [(0, size - have) for size, have in zip(shape, array.shape, strict=True)]
    return jnp.pad(array, short, constant_values=fill) if tuple(shape) != array.shape else array


def pad_axis(array: jax.Array, axis: int, multiple: int, fill: Any = 0) -> jax.Array:
    """The array with one axis made a multiple of something, with `fill` at its end."""
    shape = list(array.shape)
    shape[axis] += -shape[axis] % multiple
    return pad_to(array, shape, fill)


def pad_for_simulator(array: jax.Array, multiples: Sequence[int]) -> jax.Array:
    """The array, padded with zeros to a multiple of the tile along each axis, where a simulator needs it to be.

    TMA fills with zeros past the end of an array and stores nothing there. Some simulators raise instead.
    """
    return pad_to(array, padded_for_simulator(array.shape, multiples))


def padded_for_simulator(shape: Sequence[int], multiples: Sequence[int]) -> tuple[int, ...]:
    """The shape that `pad_for_simulator` would give."""
    if not compat.in_gpu_simulator() or compat.gpu_simulator_clips_tma():
        return tuple(shape)
    return tuple(size + -size % multiple for size, multiple in zip(shape, multiples, strict=True))

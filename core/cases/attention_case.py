"""How the cases of `attention` are written: sizes, options, and edits of the arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from opmux.core.cases.case import Case

F32, BF16, F16 = np.dtype(np.float32), np.dtype(jnp.bfloat16), np.dtype(np.float16)

Arrays = dict[str, Any]
Edit = Callable[[np.random.Generator, Arrays], None]


def make_case(
    name: str,
    edit: Edit | None = None,
    *,
    B: int = 2,
    T: int = 5,
    S: int = 7,
    N: int = 4,
    K: int = 2,
    H: int = 8,
    Hv: int | None = None,
    dtype: Any = F32,
    grad: bool = True,
    rtol: float | None = None,
    source: str = "",
    transforms: bool = False,
    **options: Any,
) -> Case:
    """A case of the given sizes; `edit` adds arrays to the arguments or changes them in place."""

    def build(rng: np.random.Generator) -> tuple[tuple[Any, ...], Arrays]:
        arrays: Arrays = {
            "query": rng.standard_normal((B, T, N, H)),
            "key": rng.standard_normal((B, S, K, H)),
            "value": rng.standard_normal((B, S, K, H if Hv is None else Hv)),
        }
        arrays = {name: array.astype(dtype) for name, array in arrays.items()}
        for option, given in options.items():
            arrays[option] = np.asarray(given, np.int32) if isinstance(given, list) else given
        if edit is not None:
            edit(rng, arrays)
        return tuple(arrays.pop(name) for name in ("query", "key", "value")), arrays

    return Case(name, build, grad=grad, rtol=rtol, source=source, transforms=transforms)


def random_mask(*shape: int) -> Edit:
    """A random mask, of which every row of the last axis keeps its first key."""

    def edit(rng: np.random.Generator, arrays: Arrays) -> None:
        mask = rng.random(shape) < 0.6
        mask[..., 0] = True
        arrays["mask"] = mask

    return edit


def random_bias(*shape: int, dtype: Any = F32) -> Edit:
    """A random bias."""

    def edit(rng: np.random.Generator, arrays: Arrays) -> None:
        arrays["bias"] = rng.standard_normal(shape).astype(dtype)

    return edit


def assign(argument: str, index: Any, value: Any, first: Edit | None = None) -> Edit:
    """`argument[index] = value`, after another edit."""

    def edit(rng: np.random.Generator, arrays: Arrays) -> None:
        if first is not None:
            first(rng, arrays)
        arrays[argument][index] = value

    return edit


def chain(*edits: Edit) -> Edit:
    """Edits one after another."""

    def edit(rng: np.random.Generator, arrays: Arrays) -> None:
        for one in edits:
            one(rng, arrays)

    return edit


def cast(**dtypes: Any) -> Edit:
    """Other dtypes for some arguments."""

    def edit(rng: np.random.Generator, arrays: Arrays) -> None:
        for name, dtype in dtypes.items():
            arrays[name] = arrays[name].astype(dtype)

    return edit

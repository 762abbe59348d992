"""Cases of `reduce`: axes, empty axes, accumulation, widening, identities, NaN."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from opmux.core.cases.add import BF16, F8, F16, F32, random_array
from opmux.core.cases.case import Case

KINDS = ("sum", "mean", "max", "min", "prod")


def cases() -> list[Case]:
    """Every case."""
    return [*_axes(), *_empty(), *_floats(), *_integers(), *_requested_dtypes(), *_values()]


def _case(
    name: str, shape: tuple[int, ...], given: Any = F32, *, edit: Callable[[np.ndarray], Any] | None = None,
    grad: bool = True, rtol: float | None = None, source: str = "", transforms: bool = False, **options: Any,
) -> Case:  # fmt: skip
    def build(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x = random_array(rng, shape, given)
        return (x if edit is None else np.asarray(edit(x), x.dtype),), options

    return Case(name, build, grad=grad, rtol=rtol, source=source, transforms=transforms)


def _axes() -> Iterator[Case]:
    for kind in KINDS:
        yield _case(kind, (5, 7, 9), kind=kind, axis=1, transforms=kind in ("sum", "max"))
        yield _case(f"{kind}_of_all", (5, 7), kind=kind)
    yield _case("default_is_sum", (5, 7))
    yield _case("first_axis", (13, 7), axis=0)
    yield _case("last_axis", (7, 131), axis=-1)
    yield _case("negative_axes", (3, 4, 5), axis=(-1, -3), kind="mean")
    yield _case("neighbouring_axes", (3, 4, 5, 2), axis=(1, 2), kind="max")
    yield _case("apart_axes", (3, 5, 4, 7), axis=(3, 1), kind="sum", keepdims=True, transforms=True)
    yield _case("apart_axes_prod", (3, 2, 4, 3), axis=(0, 2), kind="prod")
    yield _case("apart_by_ones", (3, 1, 5), axis=(0, 2), kind="mean")
    yield _case("no_axes", (3, 4), axis=(), kind="mean")
    yield _case("no_axes_max", (3, 4), axis=(), kind="max")
    yield _case("keepdims", (3, 4, 5), axis=1, keepdims=True)
    yield _case("keepdims_of_all", (3, 4), kind="min", keepdims=True)
    yield _case("scalar", (), kind="sum")
    yield _case("scalar_max", (), kind="max")
    yield _case("ones", (1, 1, 1), kind="prod", axis=(0, 2))


def _empty() -> Iterator[Case]:
    source = "mlx#4079; numpy#22063; numba#3119; jax#5719"
    for kind in ("sum", "mean", "prod"):
        yield _case(f"{kind}_over_nothing", (3, 0, 2), kind=kind, axis=1, source=source, grad=False)
        yield _case(f"{kind}_of_nothing", (0,), kind=kind, source=source, grad=False)
    for kind in KINDS:
        yield _case(f"{kind}_beside_nothing", (0, 3), kind=kind, axis=1, source=source)
    yield _case("sum_of_no_integers", (0, 4), np.dtype(np.int8), axis=0)
    yield _case("prod_of_no_booleans", (0, 4), np.dtype(bool), kind="prod", axis=0)


def _floats() -> Iterator[Case]:
    def ones(x: np.ndarray) -> np.ndarray:
        return np.ones_like(x)

    def hundreds(x: np.ndarray) -> np.ndarray:
        return np.full_like(x, 100)

    def tiny(x: np.ndarray) -> np.ndarray:
        return np.full_like(x, 6e-8)

    yield _case("bfloat16_does_not_saturate", (4099,), BF16, edit=ones, source="ml_dtypes#63; jax#17792")
    yield _case("float16_does_not_overflow", (3, 1031), F16, edit=hundreds, kind="mean", axis=1, source="numpy#8217")
    yield _case("float16_does_not_underflow", (3, 1031), F16, edit=tiny, axis=1, source="jax#26365")
    for given in (F16, BF16):
        for kind in KINDS:
            yield _case(f"{given.name}_{kind}", (7, 33), given, kind=kind, axis=0, grad=kind == "sum")
    yield _case("float8_sum", (7, 33), F8, axis=1, grad=False)
    yield _case("float8_max", (7, 33), F8, kind="max", axis=1, grad=False)
    yield _case("float32_long_sum", (2, 65537), axis=1)
    yield _case("complex64_sum", (5, 7), np.dtype(np.complex64), axis=0)
    yield _case("complex64_mean", (5, 7), np.dtype(np.complex64), axis=1, kind="mean")


def _integers() -> Iterator[Case]:
    source = "jax#10813; jax#12532; jax#20842; jax#37991"
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        yield _case(f"{name}_sum", (7, 33), np.dtype(name), axis=1, source=source)
    yield _case("int8_prod", (7, 5), np.dtype(np.int8), kind="prod", axis=1)
    yield _case("int8_mean", (7, 33), np.dtype(np.int8), kind="mean", axis=1)
    for kind in KINDS:
        yield _case(f"bool_{kind}", (7, 3), np.dtype(bool), kind=kind, axis=1, source=source)
    for name in ("int8", "int32"):
        lowest = np.iinfo(name).min
        yield _case(f"{name}_max_of_lowest", (3, 131), np.dtype(name), edit=lambda x, lowest=lowest: x * 0 + lowest,
                    kind="max", axis=1, source="tt-metal#21071; tt-metal#43989")  # fmt: skip
    yield _case("int8_max_of_negatives", (3, 131), np.dtype(np.int8), edit=lambda x: x | -128, kind="max", axis=1)
    yield _case("uint8_min_of_highest", (3, 131), np.dtype(np.uint8), edit=lambda x: x | 255, kind="min", axis=1)


def _requested_dtypes() -> Iterator[Case]:
    yield _case("int8_sum_in_int8", (7, 33), np.dtype(np.int8), axis=1, dtype="int8")
    yield _case("int32_sum_in_float32", (7, 5), np.dtype(np.int16), axis=1, dtype="float32")
    yield _case("float32_sum_in_bool", (3, 4), edit=_one_is_zero, axis=1, dtype="bool", grad=False)
    yield _case("float32_prod_in_bool", (3, 4), edit=_one_is_zero, axis=1, kind="prod", dtype="bool", grad=False)
    yield _case("float32_sum_in_int32", (3, 5), edit=lambda x: x * 10, axis=1, dtype="int32", grad=False)
    yield _case("float32_sum_in_float16", (3, 5), axis=1, dtype="float16", grad=False)
    yield _case("bfloat16_sum_in_float32", (3, 515), BF16, axis=1, dtype="float32", grad=False)
    yield _case("bfloat16_mean_in_float32", (3, 515), BF16, axis=1, kind="mean", dtype="float32", grad=False)
    yield _case("int16_mean_in_int32", (3, 5), np.dtype(np.int16), axis=1, kind="mean", dtype="int32")
    yield _case("float32_max_in_int32", (3, 5), edit=lambda x: x * 10, axis=1, kind="max", dtype="int32", grad=False)
    yield _case("int16_min_in_float32", (3, 5), np.dtype(np.int16), axis=1, kind="min", dtype="float32")


def _one_is_zero(x: np.ndarray) -> np.ndarray:
    x[0], x[1, 2] = 0, 0
    return x


def _values() -> Iterator[Case]:
    def nan_first(x: np.ndarray) -> np.ndarray:
        x[0, 0], x[1, -1] = np.nan, np.nan
        return x

    def infinite(x: np.ndarray) -> np.ndarray:
        x[0], x[1, 3], x[2, 5] = -np.inf, np.inf, -np.inf
        return x

    def zeros(x: np.ndarray) -> np.ndarray:
        x[0, 1], x[1, 0], x[1, 3] = 0, 0, 0
        return x

    for kind in KINDS:
        yield _case(f"{kind}_of_nan", (3, 37), edit=nan_first, kind=kind, axis=1, grad=False,
                    source="triton#7349; pytorch#100572; openxla/xla#21461; tinygrad#16685")  # fmt: skip
    for kind in ("sum", "max", "min"):
        yield _case(f"{kind}_of_infinities", (4, 37), edit=infinite, kind=kind, axis=1, grad=False)
    yield _case("bfloat16_max_of_nan", (3, 37), BF16, edit=nan_first, kind="max", axis=1, grad=False)
    yield _case("prod_with_zeros", (3, 5), edit=zeros, kind="prod", axis=1)
    # Finite differences know no gradient of a tie: the one of JAX, an even share, is tested apart.
    yield _case("max_of_ties", (3, 8), edit=np.round, kind="max", axis=1, grad=False)

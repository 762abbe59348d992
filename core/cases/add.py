"""Cases of `add`: broadcasting, promotion, weak types, wrap-around, and sizes that are no multiple of anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from opmux.core.cases.case import Case

BF16, F16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float16), np.dtype(np.float32)
F8 = np.dtype(jnp.float8_e4m3fn)


def cases() -> list[Case]:
    """Every case."""
    return [*_shapes(), *_dtypes(), *_weak_types(), *_values()]


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Standard normal floats, integers over the whole range of their dtype, or booleans."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return rng.integers(int(info.min), int(info.max), shape, endpoint=True, dtype=np.int64).astype(dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return rng.random(shape) < 0.5
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def _case(name: str, x: Any, y: Any, dtype: Any = F32, y_dtype: Any = None, **options: Any) -> Case:
    """A case of two shapes, or of Python scalars in their places."""

    def build(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        x_array = random_array(rng, x, dtype) if isinstance(x, tuple) else x
        y_array = random_array(rng, y, dtype if y_dtype is None else y_dtype) if isinstance(y, tuple) else y
        return (x_array, y_array), {}

    return Case(name, build, **options)


def _shapes() -> Iterator[Case]:
    yield _case("plain", (8, 8), (8, 8), transforms=True)
    yield _case("odd", (7, 131), (7, 131), source="jax#3599; jax#38432; jax#32123")
    yield _case("one", (1,), (1,))
    yield _case("scalars", (), ())
    yield _case("row_and_column", (33, 1), (1, 17), transforms=True)
    yield _case("leading_axis", (5, 3, 7), (7,))
    yield _case("scalar_array", (), (3, 5))
    yield _case("both_broadcast", (2, 1, 3), (4, 1), source="jax#3056; jax#3768")
    yield _case("alternating", (3, 1, 5, 1, 2), (1, 4, 1, 6, 2))
    yield _case("rank_8", (1, 2, 1, 3, 1, 2, 1, 2), (2, 1, 2, 1, 2, 1, 3, 1))
    yield _case("empty", (0, 3), (0, 3), source="jax#22275; jax#25379")
    yield _case("empty_by_broadcast", (5, 0), (1, 1))
    yield _case("empty_against_one", (0,), (1,))


def _dtypes() -> Iterator[Case]:
    for dtype in (F16, BF16, F8):
        yield _case(dtype.name, (5, 19), (5, 19), dtype, grad=dtype != F8)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32"):
        yield _case(f"{name}_wraps", (5, 19), (5, 19), np.dtype(name))
    yield _case("bool_is_or", (5, 19), (5, 19), np.dtype(bool), source="jax#22204; jax#18927")
    yield _case("complex64", (5, 7), (5, 7), np.dtype(np.complex64), grad=False)
    for one, other in (
        (BF16, F16), (BF16, F32), (np.int32, BF16), (np.int8, np.uint8), (np.uint8, np.int32), (np.bool_, np.int8),
        (np.bool_, F32), (np.uint16, np.int8),
    ):  # fmt: skip
        one, other = np.dtype(one), np.dtype(other)
        yield _case(f"{one.name}_and_{other.name}", (3, 7), (3, 7), one, other)
    yield _case("float32_and_complex64", (3, 7), (3, 7), F32, np.dtype(np.complex64), grad=False)


def _weak_types() -> Iterator[Case]:
    yield _case("python_float", (3, 5), 1.5)
    yield _case("python_float_first", 1.5, (3, 5))
    yield _case("python_float_keeps_16_bits", (3, 5), 1.5, BF16)
    yield _case("python_int_keeps_8_bits", (3, 5), 100, np.dtype(np.int8))
    yield _case("python_int_and_floats", (3, 5), 3, F16)
    yield _case("python_bool", (3, 5), True, np.dtype(np.int16))
    yield _case("python_float_makes_integers_weak", (3, 5), 0.5, np.dtype(np.int32))
    yield _case("python_scalars", 2, 0.5)
    yield _case("python_ints", 2, 3)
    yield _case("python_bools", True, False)
    yield _case("numpy_scalar", np.float32(0.5), (3, 5), BF16, y_dtype=BF16)


def _values() -> Iterator[Case]:
    def not_finite(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = np.array([0.0, -0.0, 1.0, np.inf, -np.inf, np.nan], F32)
        return (values[:, None], values[None, :]), {}

    def overflow(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (np.full((3, 3), 60000, F16), np.full((3, 3), 6000, F16)), {}

    yield Case("not_finite", not_finite, grad=False)
    yield Case("float16_overflows", overflow, grad=False)

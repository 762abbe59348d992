"""Cases of `matmul`: ranks and batches, empty axes, accumulation, integers, precisions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from jax import lax

from opmux.core.cases.add import BF16, F16, F32, random_array
from opmux.core.cases.case import Case

I8, I32 = np.dtype(np.int8), np.dtype(np.int32)


def cases() -> list[Case]:
    """Every case."""
    return [*_shapes(), *_empty(), *_dtypes(), *_integers(), *_precisions(), *_values()]


def _case(
    name: str, a: tuple[int, ...], b: tuple[int, ...], dtype: Any = F32, b_dtype: Any = None, *, grad: bool = True,
    rtol: float | None = None, source: str = "", transforms: bool = False, **options: Any,
) -> Case:  # fmt: skip
    def build(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (random_array(rng, a, dtype), random_array(rng, b, dtype if b_dtype is None else b_dtype)), options

    return Case(name, build, grad=grad, rtol=rtol, source=source, transforms=transforms)


def _shapes() -> Iterator[Case]:
    yield _case("plain", (5, 7), (7, 6), transforms=True)
    yield _case("odd", (100, 131), (131, 37), source="helion#2062; jax-triton#170; tt-metal#52302")
    yield _case("ones", (1, 1), (1, 1))
    yield _case("row_and_column", (1, 33), (33, 1))
    yield _case("column_and_row", (33, 1), (1, 17))
    yield _case("vectors", (9,), (9,))
    yield _case("vector_and_matrix", (9,), (9, 5))
    yield _case("matrix_and_vector", (5, 9), (9,))
    yield _case("vector_and_batch", (9,), (3, 9, 5))
    yield _case("batch_and_vector", (3, 5, 9), (9,))
    yield _case("batch", (3, 5, 9), (3, 9, 7))
    yield _case("weights", (2, 3, 5, 9), (9, 7), transforms=True)
    yield _case("batch_of_columns", (5, 9), (4, 9, 7))
    yield _case("batches_of_other_ranks", (2, 3, 5, 9), (3, 9, 7))
    yield _case("batches_broadcast_both", (2, 1, 5, 9), (1, 3, 9, 7))
    yield _case("batches_broadcast_mixed", (4, 1, 3, 2, 9), (4, 2, 1, 9, 3))


def _empty() -> Iterator[Case]:
    yield _case("no_terms", (6, 0), (0, 5), source="numba#4483; numpy#5663; triton#7808")
    yield _case("no_terms_in_a_batch", (2, 6, 0), (2, 0, 5))
    yield _case("no_terms_of_vectors", (0,), (0,))
    yield _case("no_rows", (0, 5), (5, 3))
    yield _case("no_columns", (3, 5), (5, 0))
    yield _case("no_batch", (0, 2, 3), (3, 4))
    yield _case("no_batch_by_broadcast", (0, 2, 3), (1, 3, 4))


def _dtypes() -> Iterator[Case]:
    for dtype in (F16, BF16):
        yield _case(dtype.name, (17, 33), (33, 9), dtype)
        yield _case(f"{dtype.name}_long_sum", (3, 4099), (4099, 2), dtype, source="jax#18165; ml_dtypes#63", grad=False)
        yield _case(
            f"{dtype.name}_to_float32", (5, 9), (9, 7), dtype, preferred_element_type=F32, rtol=1e-6, grad=False
        )
    yield _case("float16_broad", (24, 952), (952, 24), F16, source="jax#26684; jax#34454", grad=False)
    yield _case("float32_to_bfloat16", (5, 9), (9, 7), F32, preferred_element_type=BF16, grad=False)
    yield _case("bfloat16_and_float32", (5, 9), (9, 7), BF16, F32)
    yield _case("bfloat16_and_int8", (5, 9), (9, 7), BF16, I8, source="jax#17214; ml_dtypes#235")
    yield _case("float16_and_bfloat16", (5, 9), (9, 7), F16, BF16)
    yield _case("complex64", (5, 9), (9, 7), np.dtype(np.complex64), grad=False)
    yield _case("float32_to_complex64", (5, 9), (9, 7), preferred_element_type=np.dtype(np.complex64), grad=False)


def _integers() -> Iterator[Case]:
    yield _case("int8_wraps", (5, 131), (131, 7), I8, source="triton#2296; triton#3566")
    yield _case("int8_to_int32", (5, 131), (131, 7), I8, preferred_element_type=I32, source="iree#8491")
    yield _case("int8_to_int16", (5, 131), (131, 7), I8, preferred_element_type=np.dtype(np.int16))
    yield _case("int8_to_float32", (5, 131), (131, 7), I8, preferred_element_type=F32)
    yield _case("uint8_and_int8", (5, 9), (9, 7), np.dtype(np.uint8), I8)
    yield _case("int8_and_int32", (5, 9), (9, 7), I8, I32)
    for name in ("uint8", "int16", "uint16", "int32", "uint32"):
        yield _case(f"{name}_wraps", (5, 19), (19, 7), np.dtype(name))
    yield _case("bool", (5, 3), (3, 7), np.dtype(bool))
    yield _case("bool_to_int32", (5, 19), (19, 7), np.dtype(bool), preferred_element_type=I32)


def _precisions() -> Iterator[Case]:
    for precision in ("default", "high", "highest"):
        yield _case(f"precision_{precision}", (5, 33), (33, 7), precision=precision, grad=precision == "highest",
                    rtol=None if precision == "highest" else 2e-2)  # fmt: skip
    yield _case("precision_long_sum", (3, 2053), (2053, 4), precision=lax.Precision.HIGHEST,
                source="jax#9973; jax#14022; jax#12008; jax#1856")  # fmt: skip
    yield _case("precision_pair", (5, 33), (33, 7), precision=("highest", lax.Precision.HIGHEST), grad=False)
    yield _case("precision_algorithm", (5, 33), (33, 7), precision=lax.DotAlgorithmPreset.F32_F32_F32)


def _values() -> Iterator[Case]:
    def nan_in_a_row(rng: np.random.Generator) -> tuple[tuple[Any, ...], dict[str, Any]]:
        a, b = random_array(rng, (5, 9), F32), random_array(rng, (9, 7), F32)
        a[2, 3], b[4, 1] = np.nan, np.inf
        return (a, b), {}

    yield Case("not_finite", nan_in_a_row, grad=False)

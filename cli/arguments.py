"""What `opmux explain` is told about a call: abstract arrays and parameters, as text.

    query=bf16[2,1024,8,128]     an array: dtype and shape; f32[] is a scalar array
    y=3.0                        a Python number
    is_causal=true               a parameter: a Python literal, true, false, none, or else a string

Nothing here imports JAX: text that does not parse is refused before anything slow is loaded.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from opmux.core.errors import near_matches

_BITS = (8, 16, 32, 64)
_DTYPES = {
    "bool": "bool", "pred": "bool",
    "bf16": "bfloat16", "bfloat16": "bfloat16", "half": "float16",
    "c64": "complex64", "complex64": "complex64", "c128": "complex128", "complex128": "complex128",
    **{name: f"float{bits}" for bits in (16, 32, 64) for name in (f"f{bits}", f"float{bits}")},
    **{name: f"int{bits}" for bits in _BITS for name in (f"s{bits}", f"i{bits}", f"int{bits}")},
    **{name: f"uint{bits}" for bits in _BITS for name in (f"u{bits}", f"uint{bits}")},
    **{name: f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz")
       for name in (f"f8{kind}", f"float8_{kind}")},
}  # fmt: skip
_WIDE = ("float64", "int64", "uint64", "complex128")
_WORDS = {"true": True, "false": False, "none": None, "inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
_EXAMPLE = "query=bf16[2,1024,8,128]"


@dataclass(frozen=True)
class AbstractArray:
    """Dtype, by NumPy's name, and shape of an array that is not there."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def wide(self) -> bool:
        """Whether it is of a 64-bit dtype, which JAX has only where `jax_enable_x64` is on."""
        return self.dtype in _WIDE


def dtype(text: str) -> str:
    """NumPy's name of a dtype that is spelt in any of the usual ways: `bf16`, `f32`, `s8`, `i8`, `int8`, `bool`.

    Raises:
      argparse.ArgumentTypeError: there is no such dtype.
    """
    found = _DTYPES.get(text.strip().lower())
    if found is None:
        near = near_matches(text.strip().lower(), _DTYPES)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise argparse.ArgumentTypeError(
            f"unknown dtype {text!r}; {meant}Allowed: bf16, f16, f32, f64, s8 to s64 (or i8, int8), u8 to u64, "
            "bool, c64, c128, f8e4m3fn, f8e5m2, or NumPy's full names"
        )
    return found


def array(text: str) -> AbstractArray | None:
    """The array that `bf16[2,1024]` describes; None if the text is not of this form.

    Raises:
      argparse.ArgumentTypeError: it is, but the dtype or a dimension is impossible.
    """
    match = re.fullmatch(r"\s*([A-Za-z]\w*)\s*\[([^\[\]]*)\]\s*", text)
    if match is None:
        return None
    name = dtype(match[1])
    dims = [dim.strip() for dim in match[2].split(",")] if match[2].strip() else []
    for dim in dims:
        if not re.fullmatch(r"[0-9]+", dim):
            raise argparse.ArgumentTypeError(
                f"dimension {dim!r} in {text!r}; allowed: whole numbers separated by commas, such as bf16[2,1024,8,128]"
            )
    return AbstractArray(name, tuple(map(int, dims)))


def argument(text: str) -> tuple[str, Any]:
    """`--arg`: a name with an abstract array or a Python number.

    Raises:
      argparse.ArgumentTypeError: the text says neither.
    """
    name, value = _pair(text, _EXAMPLE)
    found = array(value)
    if found is not None:
        return name, found
    number = _literal(value)
    if isinstance(number, str):
        raise argparse.ArgumentTypeError(
            f"argument {name!r}: got {value!r}; allowed: DTYPE[DIMS] such as bf16[2,1024,8,128] or f32[], "
            f"or a Python number. Example: --arg {_EXAMPLE}"
        )
    return name, number


def parameter(text: str) -> tuple[str, Any]:
    """`--param`: a name with a Python value; what is no literal is a string.

    Raises:
      argparse.ArgumentTypeError: there is no name.
    """
    name, value = _pair(text, "is_causal=true")
    found = _literal(value)
    if isinstance(found, str) and name.endswith(("dtype", "_type")) and found.lower() in _DTYPES:
        return name, dtype(found)
    return name, found


def config(text: str) -> dict[str, Any]:
    """`--config`: fields of a kernel config, as a JSON object.

    Raises:
      argparse.ArgumentTypeError: the text is no JSON object.
    """
    example = "--config '{\"block_q\": 256}'"
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"no JSON at column {error.colno}: {error.msg}. Example: {example}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"got a JSON {type(found).__name__}; allowed: an object. Example: {example}")
    return {name: _tuples(value) for name, value in found.items()}


def _pair(text: str, example: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier() or not value.strip():
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: NAME=VALUE. Example: {example}")
    return name.strip(), value.strip()


def _literal(text: str) -> Any:
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    try:
        return _tuples(ast.literal_eval(word))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return word


def _tuples(value: Any) -> Any:
    """Lists as tuples: parameters are part of what is compiled, so they must be hashable."""
    return tuple(map(_tuples, value)) if isinstance(value, list | tuple) else value

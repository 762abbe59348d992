import argparse
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from opmux.cli import arguments
from opmux.cli.arguments import AbstractArray
from opmux.core.request import short_dtype


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [
        ("bf16[2,1024,8,128]", "bfloat16", (2, 1024, 8, 128)),
        ("f32[]", "float32", ()),
        ("f32[ ]", "float32", ()),
        (" f16[ 2 , 3 ] ", "float16", (2, 3)),
        ("f64[0,1]", "float64", (0, 1)),
        ("s8[4]", "int8", (4,)),
        ("i8[4]", "int8", (4,)),
        ("int8[4]", "int8", (4,)),
        ("u8[4]", "uint8", (4,)),
        ("uint64[4]", "uint64", (4,)),
        ("bool[2,2]", "bool", (2, 2)),
        ("BF16[1]", "bfloat16", (1,)),
        ("bfloat16[1]", "bfloat16", (1,)),
        ("float32[1]", "float32", (1,)),
        ("f8e4m3fn[1]", "float8_e4m3fn", (1,)),
        ("float8_e5m2[1]", "float8_e5m2", (1,)),
        ("c64[1]", "complex64", (1,)),
    ],
)
def test_arrays(text: str, dtype: str, shape: tuple[int, ...]) -> None:
    assert arguments.argument(f"x={text}") == ("x", AbstractArray(dtype, shape))
    with jax.enable_x64(True):
        assert jnp.zeros((), np.dtype(dtype)).dtype == dtype


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]
)
def test_dtypes_are_read_as_requests_print_them(dtype: str) -> None:
    assert arguments.dtype(short_dtype(dtype)) == arguments.dtype(dtype) == dtype


@pytest.mark.parametrize(
    ("text", "value"), [("3.0", 3.0), ("-2", -2), ("true", True), ("1e-3", 1e-3), ("2j", 2j), ("-inf", -math.inf)]
)
def test_python_scalars(text: str, value: object) -> None:
    name, found = arguments.argument(f"y={text}")
    assert (name, found, type(found)) == ("y", value, type(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("query", "allowed: NAME=VALUE. Example: query=bf16[2,1024,8,128]"),
        ("=bf16[2]", "allowed: NAME=VALUE"),
        ("query=", "allowed: NAME=VALUE"),
        ("1x=f32[2]", "allowed: NAME=VALUE"),
        ("query=bf16", "argument 'query': got 'bf16'; allowed: DTYPE[DIMS] such as"),
        ("query=bf16[2,1024", "argument 'query': got 'bf16[2,1024'"),
        ("query=bf16[2,x]", "dimension 'x'"),
        ("query=bf16[2,-1]", "dimension '-1'"),
        ("query=bf16[2,,3]", "dimension ''"),
        ("query=bf16[2.5]", "dimension '2.5'"),
        ("query=bf17[2]", "unknown dtype 'bf17'; did you mean bf16"),
        ("query=zzz[2]", "unknown dtype 'zzz'; Allowed: bf16, f16"),
    ],
)
def test_errors_name_what_was_given_and_what_is_allowed(text: str, problem: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        arguments.argument(text)
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("none", None),
        ("-1", -1),
        ("0.125", 0.125),
        ("sum", "sum"),
        ("bottom_right", "bottom_right"),
        ("'sum'", "sum"),
        ("(0, 64, 128)", (0, 64, 128)),
        ("0,64,128", (0, 64, 128)),
        ("[0, 64]", (0, 64)),
        ("(128, None)", (128, None)),
        ("a=b", "a=b"),
    ],
)
def test_parameters(text: str, value: object) -> None:
    assert arguments.parameter(f"p={text}") == ("p", value)


def test_parameters_that_are_dtypes_take_the_short_names() -> None:
    assert arguments.parameter("dtype=bf16") == ("dtype", "bfloat16")
    assert arguments.parameter("preferred_element_type=s32") == ("preferred_element_type", "int32")
    assert arguments.parameter("kind=f32") == ("kind", "f32")


def test_config_is_a_json_object() -> None:
    assert arguments.config('{"block_q": 256, "order": [1, 2]}') == {"block_q": 256, "order": (1, 2)}


@pytest.mark.parametrize(("text", "problem"), [("{", "column 2"), ("[1]", "a JSON list"), ("3", "a JSON int")])
def test_config_errors(text: str, problem: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="Example: --config") as caught:
        arguments.config(text)
    assert problem in str(caught.value)

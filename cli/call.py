"""A call that a command is told of: its options, and the arguments that they come to."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from opmux.cli import arguments
from opmux.cli.arguments import AbstractArray
from opmux.core.errors import ArgumentTypeError

if TYPE_CHECKING:
    from opmux.core.op import Op


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the op, `--arg` and `--param`."""
    parser.add_argument("op", metavar="OP", help="name of the op; `opmux list` has them all")
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        type=arguments.argument,
        metavar="NAME=DTYPE[DIMS]",
        help="an array argument, such as query=bf16[2,1024,8,128]; DTYPE[] is a scalar array, NAME=3.0 a Python number",
    )
    parser.add_argument(
        "--param",
        action="append",
        default=[],
        type=arguments.parameter,
        metavar="NAME=VALUE",
        help="a parameter: a Python literal, true, false, none, or a string; a tuple is written 0,64,128",
    )


def values(op: Op, given: argparse.Namespace) -> tuple[dict[str, Any], AbstractContextManager[Any]]:
    """The arguments by name, arrays as `jax.ShapeDtypeStruct`, and a context that has dtypes as wide as theirs.

    Raises:
      ArgumentTypeError: an argument is missing, given twice, or text where an array should be.
    """
    import jax
    import numpy as np

    found = _by_name(op.name, [*given.arg, *given.param])
    for name, _ in given.param:
        if isinstance(found[name], str) and name in op.signature.parameters and name not in op.static:
            raise ArgumentTypeError(
                op.name, name, f"the text {found[name]!r}", "an array", f"Example: --arg {name}=f32[8,128]."
            )
    for name, parameter in op.signature.parameters.items():
        if parameter.default is parameter.empty and name not in found:
            raise ArgumentTypeError(
                op.name, name, "nothing", "an array", f"Example: --arg {name}=f32[8,128], with a shape of your own."
            )
    wide = any(isinstance(value, AbstractArray) and value.wide for value in found.values())
    structs = {
        name: jax.ShapeDtypeStruct(value.shape, np.dtype(value.dtype)) if isinstance(value, AbstractArray) else value
        for name, value in found.items()
    }
    # Without this JAX would narrow a 64-bit array, and the answer would be for another call.
    return structs, jax.enable_x64(True) if wide else contextlib.nullcontext()


def _by_name(op: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ArgumentTypeError(op, name, "two values", "one --arg or --param for each argument")
        found[name] = value
    return found

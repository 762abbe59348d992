"""`opmux explain`: which backend a call would get, and why, without running anything."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from opmux.cli import arguments, layout
from opmux.cli.arguments import AbstractArray
from opmux.core.errors import ArgumentTypeError

_EPILOG = """\
examples:
  opmux explain attention --arg query=bf16[2,1024,8,128] \\
      --arg key=bf16[2,1024,2,128] --arg value=bf16[2,1024,2,128] \\
      --param is_causal=true --device h200
  opmux explain matmul --arg a=f32[64,256] --arg b=f32[256,32] --backend xla
  opmux explain reduce --arg x=bf16[8,4096] --param axis=-1 --json

Exit codes: 0 a backend was chosen; 1 none can run the call; 2 wrong usage.
"""


def add_parser(subparsers: layout.Subparsers) -> None:
    """Adds the command `explain`."""
    parser = subparsers.add_parser(
        "explain",
        help="which backend a call would get, and why",
        description="Says which backend a call would get and what speaks against every other one. Runs nothing; with "
        "--device it touches no device and works for devices that are absent.",
        epilog=_EPILOG,
        formatter_class=layout.Help,
    )
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
    parser.add_argument("--device", metavar="NAME", help="a declared device: h200, tpu-v6e, cpu; default: JAX's own")
    parser.add_argument("--backend", metavar="NAME[,NAME]", help="force backends, as get(op, backend=...) does")
    parser.add_argument(
        "--config", type=arguments.config, metavar="JSON", help="fields of the kernel config to override"
    )
    parser.add_argument("--json", action="store_true", help="print the decision as one JSON document")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Prints the decision; 1 if nothing can run the call.

    Raises:
      OpmuxError: a name means nothing, or the op does not take these arguments.
    """
    import jax

    from opmux import registry

    handle = registry.get(given.op, backend=given.backend, device=given.device, config=given.config)
    values = _by_name(given.op, [*given.arg, *given.param])
    for name, _ in given.param:
        if isinstance(values[name], str) and name in handle.op.signature.parameters and name not in handle.op.static:
            raise ArgumentTypeError(
                given.op, name, f"the text {values[name]!r}", "an array", f"Example: --arg {name}=f32[8,128]."
            )
    for name, found in handle.op.signature.parameters.items():
        if found.default is found.empty and name not in values:
            raise ArgumentTypeError(
                given.op, name, "nothing", "an array", f"Example: --arg {name}=f32[8,128], with a shape of your own."
            )
    wide = any(isinstance(value, AbstractArray) and value.wide for value in values.values())
    # Without this JAX would narrow a 64-bit array, and the answer would be for another call.
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        decision = handle.explain(**{name: _struct(value) for name, value in values.items()})
    print(decision.model_dump_json(indent=2) if given.json else decision)
    return 0 if decision.backend else 1


def _by_name(op: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ArgumentTypeError(op, name, "two values", "one --arg or --param for each argument")
        values[name] = value
    return values


def _struct(value: Any) -> Any:
    import jax
    import numpy as np

    return jax.ShapeDtypeStruct(value.shape, np.dtype(value.dtype)) if isinstance(value, AbstractArray) else value

"""`opmux compile`: one call, compiled and measured for devices that may be absent."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from opmux.cli import arguments, call, layout
from opmux.cli.certify import names

_EPILOG = """\
examples:
  opmux compile add --arg x=f32[4096,4096] --arg y=f32[4096,4096] \\
      --target tpu-v6e,h200
  opmux compile reduce --arg x=bf16[8,4096] --param axis=-1 --target h200 \\
      --config '{"num_stages": 2}' --dump texts

Exit codes: 0 it compiles for every target; 1 it does not, or spills; 2 wrong
usage, or a compiler is missing.
"""


def add_parser(subparsers: layout.Subparsers) -> None:
    """Adds the command `compile`."""
    parser = subparsers.add_parser(
        "compile",
        help="compile and measure one call for absent devices",
        description="Compiles the kernel that a call would get for each device, which may be absent, and prints what "
        "it costs there: registers, spills, memory, instructions or scheduled bundles, and a roofline estimate.",
        epilog=_EPILOG,
        formatter_class=layout.Help,
    )
    call.add_options(parser)
    parser.add_argument("--target", required=True, type=names, metavar="NAME[,NAME]", help="devices: tpu-v6e,h200")
    parser.add_argument("--backend", metavar="NAME", help="default: the one that would be chosen on each device")
    parser.add_argument(
        "--config", type=arguments.config, metavar="JSON", help="fields of the kernel config to override"
    )
    parser.add_argument("--dump", metavar="DIR", type=Path, help="keep the compilers' texts")
    parser.add_argument("--no-cache", action="store_true", help="compile anew")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON document")
    parser.set_defaults(run=run)


def run(given: argparse.Namespace) -> int:
    """Compiles, and prints what was measured for each target; 1 if one does not compile, or spills.

    Raises:
      OpmuxError: a name means nothing, the op does not take these arguments, or a compiler is missing.
    """
    from opmux import registry
    from opmux.certify import compile
    from opmux.certify.report import table

    values, wide = call.values(registry.get(given.op).op, given)
    with wide:
        results = compile(
            given.op, target=given.target, backend=given.backend, config=given.config, dump=given.dump,
            cached=not given.no_cache, **values,
        )  # fmt: skip
    if given.json:
        print(json.dumps([result.model_dump(mode="json") for result in results], indent=1))
    else:
        print("\n\n".join("\n".join(table.figures(result, layout.width())) for result in results))
    return 0 if all(result.status == "ok" for result in results) else 1

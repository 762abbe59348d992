"""`opmux explain`: which backend a call would get, and why, without running anything."""

from __future__ import annotations

import argparse

from opmux.cli import arguments, call, layout

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
    call.add_options(parser)
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
    from opmux import registry

    handle = registry.get(given.op, backend=given.backend, device=given.device, config=given.config)
    values, wide = call.values(handle.op, given)
    with wide:
        decision = handle.explain(**values)
    print(decision.model_dump_json(indent=2) if given.json else decision)
    return 0 if decision.backend else 1

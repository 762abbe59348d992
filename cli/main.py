"""The `opmux` command: wires the commands, and turns opmux errors into messages and exit codes."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Sequence

from opmux.cli import certify, compile, demo, doctor, env, explain, layout, listing, version
from opmux.core.errors import OpmuxError, PluginWarning

DESCRIPTION = """\
opmux runs one op on the best of several kernels for JAX, and says why.

Exit codes: 0 fine; 1 a check failed (doctor, certify), nothing can run the call
(explain), it does not compile (compile), or the numbers are wrong (demo); 2
wrong usage, or an opmux error with a message on stderr.
"""

EXAMPLES = """\
examples:
  opmux demo
  opmux list --device h200
  opmux explain add --arg x=f32[8,8] --arg y=f32[8]
  opmux certify --backend mosaic_tpu --op reduce --target tpu-v6e
  OPMUX_BACKEND="attention=interpret;*=xla" opmux env
"""


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    found = layout.Parser(prog="opmux", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=layout.Help)
    subparsers = found.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (demo, listing, explain, compile, certify, env, doctor, version):
        command.add_parser(subparsers)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
      argv: the arguments; those of the process by default.
    """
    try:
        given = parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed help, or what is wrong
        return stop.code if isinstance(stop.code, int) else 2
    try:
        # Every command that looks at plugins prints the failures itself.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PluginWarning)
            code = given.run(given)
            sys.stdout.flush()
            return code
    except OpmuxError as error:
        return _complain(error)
    except RuntimeError as error:
        if "nable to initialize backend" not in str(error):
            raise
        return _complain(error)
    except BrokenPipeError:
        # The reader has gone, as in `opmux list | head`; without this, Python complains once more on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _complain(error: Exception) -> int:
    print("\n".join(layout.block("", f"opmux: {error}")), file=sys.stderr)
    return 2

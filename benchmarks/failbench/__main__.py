"""The command line: ``python -m benchmarks.failbench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.failbench.commands import CommandError
from benchmarks.failbench.commands.decide import add_decide
from benchmarks.failbench.commands.list import add_list
from benchmarks.failbench.commands.matrix import add_matrix
from benchmarks.failbench.commands.report import add_report
from benchmarks.failbench.commands.run import add_run

_DESCRIPTION = """\
What failures cost: seven architectures of distributed training by mechanisms of fault tolerance by traces of faults,
measured end to end on real processes. See docs/failbench.md.

  python -m benchmarks.failbench run A2/FT2/F1
  python -m benchmarks.failbench matrix --preset tiny --seeds 1
  python -m benchmarks.failbench decide --arch A2 --mtbf 3600 --overhead-cap 0.05
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command with these arguments, those of the process by default.

    Returns:
        The exit status.

    Raises:
        SystemExit: after ``--help`` (0) and for wrong usage (2).
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (CommandError, OSError, ValueError) as error:
        print(f"failbench: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.failbench",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (add_run, add_matrix, add_report, add_decide, add_list):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())

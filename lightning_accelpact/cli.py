"""The console script ``accelpact``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from lightning_accelpact.commands import CommandError
from lightning_accelpact.commands.plan import add_plan
from lightning_accelpact.commands.qualify import add_qualify
from lightning_accelpact.commands.report import add_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``accelpact`` with these arguments, those of the process by default.

    Returns:
        The exit status: 0, or 1 if the command failed.

    Raises:
        SystemExit: after ``--help`` and ``--version`` (0) and for wrong usage (2).
    """
    options = _parser().parse_args(arguments)
    try:
        return options.command(options)
    except (CommandError, OSError) as error:
        print(f"accelpact: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelpact", description="Fault recovery without checkpoint I/O for hybrid-sharded training."
    )
    parser.add_argument("--version", action="version", version=f"accelpact {_version()}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    add_report(commands)
    add_plan(commands)
    add_qualify(commands)
    return parser


def _version() -> str:
    try:
        return version("lightning-accelpact")
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())

"""The commands of ``python -m benchmarks.failbench``: one file each."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

RECORDS = Path("failbench.jsonl")
# Of a file or a pipe, in which nothing needs to be folded
_WIDE = 200


class CommandError(Exception):
    """A command cannot do what it was told; the message says why and what to do."""


def add_preset(parser: argparse.ArgumentParser) -> None:
    """Add ``--preset``."""
    text = "size of the workloads: tiny (minutes on 2 cores), cpu (hours) or paper (the paper's sizes); default: tiny"
    parser.add_argument("--preset", default="tiny", metavar="NAME", help=text)


def add_output(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--json`` with its help."""
    parser.add_argument("--json", action="store_true", help=text)


def add_deadline(parser: argparse.ArgumentParser) -> None:
    """Add ``--deadline``."""
    parser.add_argument(
        "--deadline", type=float, metavar="S", help="a run that takes longer has failed (default: the preset's)"
    )


def subparser(commands: Any, name: str, help_: str, description: str) -> argparse.ArgumentParser:
    """A command's parser, whose description keeps its lines."""
    return commands.add_parser(
        name, help=help_, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def console() -> Console:
    """For the terminal's width; for a file or a pipe wide enough for every table."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDE)

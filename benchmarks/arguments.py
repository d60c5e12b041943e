"""The command line that the benchmarks have in common."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.table import Table


def parser(name: str, doc: str, *, layers: int, width: int, batch: int | None = None) -> argparse.ArgumentParser:
    """A parser with the size of the training and the form of the output.

    Args:
        name: The benchmark's module.
        doc: Its documentation, of which the first line is the description.
        layers: Default number of sharded blocks.
        width: Default number of features of a block.
        batch: Default number of samples of one rank in an update, if that can be chosen.
    """
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.partition("\n")[0])
    made.add_argument("--ranks", type=int, default=4, help="processes, an even number (default 4)")
    made.add_argument("--layers", type=int, default=layers, help=f"sharded blocks; the root comes on top (default {layers})")
    made.add_argument("--width", type=int, default=width, help=f"features of a block (default {width})")
    if batch is not None:
        made.add_argument("--batch", type=int, default=batch, help=f"samples of one rank in an update (default {batch})")
    made.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return made


def show(figures: dict[str, Any], table: Table, as_json: bool) -> None:
    """Print what was measured: as one line of JSON, or as a table for people."""
    if as_json:
        print(json.dumps(figures))
    else:
        Console().print(table)

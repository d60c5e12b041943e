"""``run``: single cells."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.failbench.aggregation import summarize
from benchmarks.failbench.cell import Cell
from benchmarks.failbench.commands import add_deadline, add_output, add_preset, console, subparser
from benchmarks.failbench.commands.measuring import check_names, preset_of, runner
from benchmarks.failbench.matrix import Task, carry_out
from benchmarks.failbench.record import Outcome, Record, append_record
from benchmarks.failbench.tables import figure_table

_DESCRIPTION = """\
Run single cells, such as A2/FT1/F1: ring all-reduce, periodic checkpoints, one crash.

  A2/FT9/none     no mechanism, no fault: what others are compared with
  A2/FT9/hang     a rank is stopped, not killed
  A2/FT4/preempt  a rank is killed after a warning

The exit status is 1 if a run failed. `list` shows all names.
"""


def add_run(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = subparser(commands, "run", "run single cells", _DESCRIPTION)
    parser.add_argument("cells", nargs="+", type=_cell, metavar="ARCHITECTURE/MECHANISM/TRACE")
    parser.add_argument("--seed", type=int, default=0, help="of workload and schedule (default: 0)")
    parser.add_argument(
        "--detect-timeout", type=float, metavar="S", help="of the process groups (default: the preset's)"
    )
    parser.add_argument("--records", type=Path, metavar="FILE", help="add the records to this file of JSON lines")
    add_preset(parser)
    add_deadline(parser)
    add_output(parser, "print the records, one line of JSON each")
    parser.set_defaults(command=run_cells)


def _cell(text: str) -> Cell:
    try:
        return Cell.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run_cells(options: argparse.Namespace) -> int:
    """Run the cells and print their figures.

    Raises:
        CommandError: for an unknown preset.
        OSError: if a record cannot be written.
        ValueError: for an unknown architecture or mechanism.
    """
    preset = preset_of(options.preset)
    check_names([cell.architecture for cell in options.cells], [cell.mechanism for cell in options.cells])
    measure = runner(preset, deadline_s=options.deadline)
    tasks = [Task(cell, options.seed, options.detect_timeout) for cell in options.cells]
    records = [_kept(carry_out(task, preset.name, measure), options.records) for task in tasks]
    _show(records, options.json)
    return int(any(record.outcome is Outcome.FAILED for record in records))


def _kept(record: Record, path: Path | None) -> Record:
    if path is not None:
        append_record(path, record)
    return record


def _show(records: list[Record], as_json: bool) -> None:
    if as_json:
        print(*(record.to_json() for record in records), sep="\n")
        return
    out = console()
    out.print(figure_table(summarize(records).values()))
    for record in records:
        if record.reason:
            out.print(f"{record.cell}: {record.reason}", markup=False)

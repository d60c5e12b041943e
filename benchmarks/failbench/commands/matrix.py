"""``matrix``: all cells, into a file from which it goes on."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.failbench import registry
from benchmarks.failbench.cell import PAPER_TRACES, TRACES
from benchmarks.failbench.commands import RECORDS, CommandError, add_deadline, add_output, add_preset, subparser
from benchmarks.failbench.commands.measuring import check_names, preset_of, runner
from benchmarks.failbench.commands.report import add_plots, show_report
from benchmarks.failbench.matrix import Matrix, Task, plan

_DESCRIPTION = """\
Run all cells: the architectures by the mechanisms by the traces F1, F2 and F3. For each architecture there is also a
run without mechanism and fault, which the others are compared with, and A2 is run with a hanging rank under two
timeouts.

Each record is in the file as soon as its run is over. Started again, the command goes on where it was interrupted.
The exit status is 1 if a run failed.
"""
# Of the preset's timeout, for the cells with a hanging rank
_TIMEOUTS = (1.0, 2.0)


def add_matrix(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = subparser(commands, "matrix", "run all cells, resumable", _DESCRIPTION)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each cell (default: 1)")
    parser.add_argument(
        "--records", type=Path, default=RECORDS, metavar="FILE", help=f"JSON lines (default: {RECORDS})"
    )
    _add_names(parser, "architectures", registry.names(registry.ARCHITECTURES))
    _add_names(parser, "mechanisms", registry.names(registry.MECHANISMS))
    _add_names(parser, "traces", PAPER_TRACES, tuple(TRACES))
    parser.add_argument("--jobs", type=int, metavar="N", help="runs at once (default: one for each 8 cores)")
    parser.add_argument("--retry", action="store_true", help="run again what has failed before")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be run")
    add_preset(parser)
    add_deadline(parser)
    add_plots(parser)
    add_output(parser, "end with one line of JSON")
    parser.set_defaults(command=run_matrix)


def _add_names(
    parser: argparse.ArgumentParser, option: str, default: Sequence[str], choices: Sequence[str] | None = None
) -> None:
    text = f"default: {', '.join(default)}"
    parser.add_argument(
        f"--{option}", nargs="+", default=default, choices=choices or default, metavar="NAME", help=text
    )


def run_matrix(options: argparse.Namespace) -> int:
    """Run what the file does not have yet, and report on the whole file.

    Raises:
        CommandError: for an unknown preset or a number that makes no sense.
        OSError: if the file cannot be written.
        ValueError: for an unknown name or a file that holds something else.
    """
    preset = preset_of(options.preset)
    jobs = max(1, (os.cpu_count() or 1) // 8) if options.jobs is None else options.jobs
    if jobs < 1:
        raise CommandError(f"--jobs {jobs} must be at least 1")
    check_names(options.architectures, options.mechanisms)
    tasks = plan(
        options.architectures,
        options.mechanisms,
        options.traces,
        seeds=options.seeds,
        hang_timeouts_s=[factor * preset.detect_timeout_s for factor in _TIMEOUTS],
    )
    matrix = Matrix(tasks, preset.name, options.records, runner(preset, deadline_s=options.deadline))
    pending = matrix.pending(retry=options.retry)
    if options.dry_run:
        print(*(_name(task) for task in pending), sep="\n")
        return 0
    failed = _run(matrix, pending, jobs)
    if failed is None:
        print(
            f"interrupted; the records so far are in {options.records}, the same command goes on from there",
            file=sys.stderr,
        )
        return 130
    show_report([options.records], preset=preset.name, plots=options.plots, as_json=options.json)
    return int(failed)


def _run(matrix: Matrix, pending: Sequence[Task], jobs: int) -> bool | None:
    """Whether a run failed; None if interrupted."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    outcomes: Counter[str] = Counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(matrix.tasks), completed=len(matrix.tasks) - len(pending))
        try:
            for task, record in matrix.run(pending, jobs=jobs):
                outcomes[record.outcome.value] += 1
                progress.update(bar, advance=1, description=f"{_name(task)} {record.outcome.value}")
                if record.outcome.value == "failed" or not console.is_terminal:
                    progress.console.print(
                        f"{_name(task)}: {record.outcome.value} {record.reason}".rstrip(), markup=False
                    )
        except KeyboardInterrupt:
            return None
    return outcomes["failed"] > 0


def _name(task: Task) -> str:
    timeout = "" if task.detect_timeout_s is None else f", timeout {task.detect_timeout_s:g} s"
    return f"{task.cell} (seed {task.seed}{timeout})"

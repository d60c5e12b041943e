"""``accelpact report``: reads what runs have left, and shows it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_accelpact.commands import CommandError
from lightning_accelpact.goodput import render
from lightning_accelpact.goodput.page import render_page
from lightning_accelpact.goodput.run import Run, RunError, read_runs


def add_report(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "report",
        help="show what a run's time went to, and what its incidents cost and saved",
        description="Show the last run in each folder given to GoodputCallback(log_dir=...), with all its attempts."
        " Files in it may be given instead; after a run that ended well at the first attempt, one rank's is enough.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="log_dir of a run, or files in it")
    parser.add_argument("--json", action="store_true", help="print one JSON object per run, one a line")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one page on all runs, which needs no network")
    parser.add_argument(
        "--restart-seconds",
        type=float,
        metavar="N",
        help="to relaunch and reload, for what was saved (default: the run's)",
    )
    parser.set_defaults(command=run_report)


def run_report(options: argparse.Namespace) -> int:
    """Print the summaries, and write the page.

    Raises:
        CommandError: if the files make no run.
        OSError: if a file cannot be read or written.
    """
    try:
        runs = read_runs(options.runs)
        summaries = [run.summary(options.restart_seconds) for run in runs]
    except (RunError, ValueError) as error:
        raise CommandError(str(error)) from error
    _say_what_is_torn(runs)
    console = Console()
    for run, summary in zip(runs, summaries, strict=True):
        if options.json:
            print(json.dumps({"run": run.name, **summary.to_dict()}))
            continue
        if len(runs) > 1:
            console.rule(run.name, characters="-")
        console.print(render(summary))
    if options.html:
        options.html.parent.mkdir(parents=True, exist_ok=True)
        options.html.write_text(render_page(runs, summaries), encoding="utf-8")
        print(f"accelpact: wrote {options.html}", file=sys.stderr)
    return 0


def _say_what_is_torn(runs: Sequence[Run]) -> None:
    for run in runs:
        for rank in run.ranks:
            if rank.torn:
                print(f"accelpact: {run.name}: skipped what rank {rank.rank} left unfinished when it was killed"
                      f" (lines: {rank.torn})", file=sys.stderr)  # fmt: skip

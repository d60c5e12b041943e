"""``report``: records as tables, findings and pictures."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.failbench.aggregation import CellSummary, summarize
from benchmarks.failbench.cell import Cell
from benchmarks.failbench.commands import RECORDS, CommandError, add_output, console, subparser
from benchmarks.failbench.coverage import coverage
from benchmarks.failbench.findings import Finding, findings
from benchmarks.failbench.plots import write_plots
from benchmarks.failbench.record import Record, read_records
from benchmarks.failbench.tables import exactness, figure_table, finding_table, outcome_table, overhead_table
from lightning_accelpact.goodput.plots import PlotsUnavailable

_DESCRIPTION = """\
Show records: the outcome of each cell, its figures, overhead and restore of each mechanism on each architecture, how
many recoveries were measured, and whether the paper's findings hold.
"""


def add_report(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = subparser(commands, "report", "show records: tables, findings, pictures", _DESCRIPTION)
    add_records(parser)
    parser.add_argument("--preset", metavar="NAME", help="leave out records of other presets")
    add_plots(parser)
    add_output(parser, "end with one line of JSON")
    parser.set_defaults(command=run_report)


def add_records(parser: argparse.ArgumentParser) -> None:
    """Add ``--records``."""
    text = f"files of JSON lines (default: {RECORDS})"
    parser.add_argument("--records", nargs="+", type=Path, default=[RECORDS], metavar="FILE", help=text)


def add_plots(parser: argparse.ArgumentParser) -> None:
    """Add ``--plots``."""
    parser.add_argument(
        "--plots", type=Path, metavar="DIR", help="draw overhead against restore, one SVG for each architecture"
    )


def run_report(options: argparse.Namespace) -> int:
    """Print the report.

    Raises:
        CommandError: if there is nothing to report.
        OSError: if a file cannot be read or written.
        ValueError: if a file holds something else.
    """
    show_report(options.records, preset=options.preset, plots=options.plots, as_json=options.json)
    return 0


def records_of(paths: Sequence[Path], preset: str | None) -> list[Record]:
    """The records of some files.

    Raises:
        CommandError: if there are none, or none of the preset.
        OSError: if a file cannot be read.
        ValueError: if a file holds something else.
    """
    found = [record for record in read_records(paths) if preset in (None, record.preset)]
    if not found:
        which = "" if preset is None else f" of preset {preset}"
        raise CommandError(f"no records{which} in {', '.join(map(str, paths))}; `matrix` makes some")
    return found


def show_report(paths: Sequence[Path], *, preset: str | None, plots: Path | None, as_json: bool) -> None:
    """Print all tables, and as the last line, if asked for, the same as JSON; draw the pictures."""
    records = records_of(paths, preset)
    summaries, found = summarize(records), findings(records)
    traces = [trace for trace in dict.fromkeys(cell.trace for cell in summaries)]
    out = console()
    out.print(
        figure_table(summaries.values()),
        outcome_table(summaries, sorted(traces)),
        overhead_table(summaries.values()),
        finding_table(found),
        exactness(summaries.values()),
        str(coverage(summaries)),
        sep="\n\n",
    )
    for file in _pictures(summaries, plots) if plots else ():
        print(f"failbench: wrote {file}", file=sys.stderr)
    if as_json:
        print(json.dumps(_to_dict(summaries, found)))


def _pictures(summaries: dict[Cell, CellSummary], folder: Path) -> list[Path]:
    try:
        return write_plots(summaries, folder)
    except PlotsUnavailable as error:
        raise CommandError(str(error)) from error


def _to_dict(summaries: dict[Cell, CellSummary], found: Sequence[Finding]) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "coverage": coverage(summaries).to_dict(),
        "findings": [{"claim": one.claim, "verdict": one.verdict.value, "because": one.because} for one in found],
        "cells": {str(cell): _cell(one) for cell, one in summaries.items()},
    }


def _cell(one: CellSummary) -> dict[str, Any]:
    figures = {
        name: {"n": found.n, "mean": found.mean, "half": found.half, "spread": found.spread.value}
        for name, found in one.estimates.items()
    }
    outcomes = {outcome.value: count for outcome, count in one.outcomes.items()}
    return {"outcomes": outcomes, "evidence": one.evidence.value, "reasons": list(one.reasons), "figures": figures}

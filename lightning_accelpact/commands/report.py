"""``accelpact report``: reads what runs have left, and shows it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_accelpact.commands import CommandError
from lightning_accelpact.goodput import GoodputSummary, read_jsonl, render, summarize


def add_report(commands: Any) -> None:
    """Add the command to the parser's commands."""
    report = commands.add_parser(
        "report",
        help="show the goodput summary of a run again",
        description="Show the summary of the last run in the JSON lines that GoodputCallback(log_dir=...) wrote. After"
        " a run that ended well one rank's file is enough; after one that failed each rank knows only its own part, so"
        " give all of them.",
    )
    report.add_argument("files", nargs="+", type=Path, metavar="FILE", help="goodput-rank<rank>.jsonl of the run")
    report.add_argument("--json", action="store_true", help="print one JSON object per summary, one a line")
    report.set_defaults(command=_report)


def _report(options: argparse.Namespace) -> int:
    console = Console()
    for summary in _summaries([_RankLog.read(path) for path in options.files]):
        if options.json:
            print(json.dumps(summary.to_dict()))
        else:
            console.print(render(summary))
    return 0


@dataclass(frozen=True, kw_only=True)
class _RankLog:
    """What one file says about the last run in it.

    Args:
        path: The file.
        summary: The last summary.
        incidents: The incidents of that run, as this rank saw them.
    """

    path: Path
    summary: GoodputSummary
    incidents: tuple[Mapping[str, Any], ...]

    @classmethod
    def read(cls, path: Path) -> _RankLog:
        """Read one file, and say on standard error what had to be left out.

        Raises:
            OSError: if the file cannot be read.
            CommandError: if it holds no summary, or none that this version can read.
        """
        records, torn = read_jsonl(path)
        ends = [i for i, record in enumerate(records) if record.get("kind") == "summary"]
        if not ends:
            raise CommandError(f"{path} holds no summary: the run has not ended, or was killed; leave this file out")
        begin, end = (ends[-2] + 1 if len(ends) > 1 else 0), ends[-1]
        if torn:
            print(f"accelpact: {path}: skipped what a killed process left unfinished (lines: {torn})", file=sys.stderr)
        if end + 1 < len(records):
            print(f"accelpact: {path}: skipped a later run, which has no summary", file=sys.stderr)
        incidents = tuple(record for record in records[begin:end] if record.get("kind") == "incident")
        return cls(path=path, summary=_to_summary(records[end], path), incidents=incidents)


def _to_summary(record: Mapping[str, Any], path: Path) -> GoodputSummary:
    try:
        return GoodputSummary.from_dict(record)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CommandError(f"{path} was written by another version of accelpact: {error!r}") from error


def _summaries(logs: Iterable[_RankLog]) -> list[GoodputSummary]:
    """Every different summary of a whole run, and the partial ones put together."""
    whole: list[GoodputSummary] = []
    parts: list[_RankLog] = []
    for log in logs:
        if log.summary.ranks < log.summary.world_size:
            parts.append(log)
        elif log.summary not in whole:
            whole.append(log.summary)
    return whole + ([_together(parts)] if parts else [])


def _together(parts: Sequence[_RankLog]) -> GoodputSummary:
    """One summary of ranks that each knew only their own part."""
    world_sizes = {part.summary.world_size for part in parts}
    if len(world_sizes) > 1 or len(parts) > max(world_sizes):
        raise CommandError(
            f"{len(parts)} files with one rank each, of runs with {sorted(world_sizes)} ranks, are not of one run;"
            " give the files of one run at a time"
        )
    return summarize([_rank_record(part) for part in parts], restart_s=parts[0].summary.restart_s)


def _rank_record(part: _RankLog) -> dict[str, Any]:
    summary = part.summary
    return {
        "world_size": summary.world_size,
        "elapsed": summary.elapsed_s,
        "totals": {cls.value: seconds for cls, seconds in summary.totals.items()},
        "updates": summary.updates,
        "update_s": summary.update_s,
        "incidents": part.incidents,
    }

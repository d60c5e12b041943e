"""A run as its ranks have written it down: all attempts of each, put together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from lightning_accelpact.goodput.ledger import TimeClass, read_jsonl
from lightning_accelpact.goodput.report import GoodputSummary, summarize


class RunError(Exception):
    """The files given do not make a run; the message says why and what to do."""


def log_path(folder: str | Path, rank: int) -> Path:
    """The file of one rank in the folder of a run."""
    return Path(folder) / f"goodput-rank{rank}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one rank knew at one moment.

    Args:
        time: Unix time.
        totals: Seconds of each class since the attempt began; absent ones are 0.
        updates: Updates committed since the attempt began.
        update_s: Productive seconds of a typical update; 0 without updates.
        unfinished_s: Productive seconds of an update that was not committed yet.
        replayed: Updates that an earlier attempt had committed already.
        ended: ``completed`` or ``failed`` if it is the last one, else None.
    """

    time: float
    totals: Mapping[TimeClass, float]
    updates: int
    update_s: float
    unfinished_s: float
    ended: str | None
    replayed: int = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """From its record."""
        totals = {TimeClass(name): seconds for name, seconds in values["totals"].items()}
        names = ("time", "updates", "update_s", "unfinished_s", "ended")
        return cls(totals=totals, replayed=values.get("replayed", 0), **{name: values[name] for name in names})


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One process of one rank.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        start: Unix time at which its program started.
        step: Updates of the run that were committed when it began; None if that is not known.
        samples: In time; the last one tells where it ended, as far as is known.
        incidents: As :meth:`~.recovery.incident.Incident.to_dict` with ``checkpoint``; their frontiers count from the
            beginning of the run, as far as that is known.
        checkpoints: Unix times.
        summary: Of all ranks, if the attempt lived to write one.
    """

    rank: int
    world_size: int
    start: float
    step: int | None
    samples: tuple[Sample, ...]
    incidents: tuple[Mapping[str, Any], ...]
    checkpoints: tuple[float, ...]
    summary: GoodputSummary | None

    @property
    def end(self) -> float:
        """Unix time up to which it is known."""
        return self.samples[-1].time if self.samples else self.start

    @property
    def updates(self) -> int:
        """How many it is known to have committed."""
        return max((sample.updates for sample in self.samples), default=0)

    @property
    def reached(self) -> int:
        """Updates of the run that were committed when it ended."""
        return (self.step or 0) + self.updates

    @property
    def completed(self) -> bool:
        """Whether the run was done with it."""
        return any(sample.ended == "completed" for sample in self.samples[-1:])

    @property
    def totals(self) -> dict[TimeClass, float]:
        """Seconds of each class that has any."""
        return dict(self.samples[-1].totals) if self.samples else {}


@dataclass(frozen=True, kw_only=True)
class RankRun:
    """All attempts of one rank at one run.

    Args:
        rank: Global rank.
        attempts: In time; at least one.
        torn: Lines in its file that a killed process left unfinished.
    """

    rank: int
    attempts: tuple[Attempt, ...]
    torn: int = 0

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Unix times from the last that is known of an attempt to the start of the next."""
        pairs = zip(self.attempts, self.attempts[1:], strict=False)
        return [(before.end, max(before.end, after.start)) for before, after in pairs]

    @property
    def totals(self) -> dict[TimeClass, float]:
        """Seconds of each class over all attempts and the gaps between them.

        The gaps are infrastructure recovery. What an attempt that was cut off had put into an update that it did not
        commit is wasted progress; updates that it had committed and a later one commits again are counted there, as
        replayed.
        """
        totals = dict.fromkeys(TimeClass, 0.0)
        for attempt in self.attempts:
            for cls, seconds in attempt.totals.items():
                totals[cls] += seconds
        for attempt in self.attempts[:-1]:
            unfinished = attempt.samples[-1].unfinished_s if attempt.samples else 0.0
            totals[TimeClass.PRODUCTIVE] -= unfinished
            totals[TimeClass.WASTED_PROGRESS] += unfinished
        totals[TimeClass.INFRASTRUCTURE_RECOVERY] += sum(end - start for start, end in self.gaps)
        return totals

    @property
    def elapsed(self) -> float:
        """Seconds from the start of the first attempt to the last that is known, by the wall clock."""
        return self.attempts[-1].end - self.attempts[0].start

    @property
    def updates(self) -> int:
        """Updates of the run that all attempts together have committed; replays count twice if they are not known."""
        if any(attempt.step is None for attempt in self.attempts):
            return sum(attempt.updates for attempt in self.attempts)
        return max(attempt.reached for attempt in self.attempts) - (self.attempts[0].step or 0)

    def record(self) -> dict[str, Any]:
        """As :func:`~.report.summarize` wants it."""
        totals = self.totals
        typical = [one.samples[-1].update_s for one in self.attempts if one.samples and one.samples[-1].update_s]
        return {
            "rank": self.rank,
            "world_size": self.attempts[-1].world_size,
            "elapsed": sum(totals.values()),
            "totals": {cls.value: seconds for cls, seconds in totals.items()},
            "updates": self.updates,
            "replayed": sum(one.samples[-1].replayed for one in self.attempts if one.samples),
            "update_s": median(typical) if typical else 0.0,
            "incidents": [
                {**incident, "attempt": number} for number, one in enumerate(self.attempts) for incident in one.incidents
            ],
            "attempts": len(self.attempts),
        }


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Args:
        name: Of its folder.
        ranks: Those whose files were given, in order.
    """

    name: str
    ranks: tuple[RankRun, ...]

    def summary(self, restart_s: float | None = None) -> GoodputSummary:
        """Of all attempts. One file tells of all ranks if a single attempt lived to put them together.

        Args:
            restart_s: Seconds that a relaunch and reload takes; None as the run itself was told.

        Raises:
            RunError: if the ranks are not of one run.
            ValueError: if ``restart_s`` is negative or not finite.
        """
        attempts = [attempt for rank in self.ranks for attempt in rank.attempts]
        summaries = [attempt.summary for attempt in attempts if attempt.summary]
        if restart_s is None:
            restart_s = next((summary.restart_s for summary in summaries), None)
        whole = [summary for summary in summaries if summary.ranks == summary.world_size > len(self.ranks)]
        if whole and len(attempts) == len(self.ranks):
            return whole[0].with_restarts_of(restart_s)
        sizes = sorted({rank.attempts[-1].world_size for rank in self.ranks})
        if len(sizes) > 1:
            raise RunError(
                f"{self.name}: its files are of runs with {sizes} ranks; give each run a folder (log_dir) of its own"
            )
        return summarize([rank.record() for rank in self.ranks], restart_s=restart_s)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the last run in each folder, or what some files of a folder tell of it.

    Args:
        paths: Folders given as ``log_dir``, or files in them.

    Raises:
        OSError: if a file cannot be read.
        RunError: if a folder or file is not there, holds no run, or one of another version.
    """
    folders: dict[Path, list[Path]] = {}
    for path in paths:
        if not path.exists():
            raise RunError(f"{path} does not exist: give the folder that was the log_dir of a run, or files in it")
        files = _files(path) if path.is_dir() else [path]
        known = folders.setdefault(path if path.is_dir() else path.parent, [])
        known += [file for file in files if file not in known]
    return [_read_run(folder, files) for folder, files in folders.items()]


def _files(folder: Path) -> list[Path]:
    numbered = {
        match[1]: path for path in folder.iterdir() if (match := re.fullmatch(r"goodput-rank(\d+)\.jsonl", path.name))
    }
    if not numbered:
        below = sorted({str(path.parent) for path in folder.glob("accelpact/*/goodput-rank*.jsonl")})
        instead = f"one of {', '.join(below)}" if below else "the folder that was the log_dir of a run"
        raise RunError(f"{folder} holds no goodput-rank<rank>.jsonl: give {instead}")
    return [numbered[rank] for rank in sorted(numbered, key=int)]


def _read_run(folder: Path, files: Iterable[Path]) -> Run:
    ranks = sorted((_read_rank(file) for file in files), key=lambda one: one.rank)
    doubled = sorted({one.rank for one in ranks if [other.rank for other in ranks].count(one.rank) > 1})
    if doubled:
        raise RunError(
            f"{folder}: several files are of the ranks {doubled}; give each run a folder (log_dir) of its own"
        )
    return Run(name=folder.resolve().name, ranks=tuple(ranks))


def _read_rank(path: Path) -> RankRun:
    """The last run in one rank's file.

    A run ends with an attempt that completed it; whatever comes after belongs to the next.
    """
    attempts, torn = read_attempts(path)
    if not attempts:
        raise RunError(f"{path} holds no run: its training has not begun; leave this file out")
    return RankRun(rank=attempts[-1].rank, attempts=tuple(_last_run(attempts)), torn=torn)


def _last_run(attempts: Sequence[Attempt]) -> Sequence[Attempt]:
    completed = [number for number, attempt in enumerate(attempts[:-1], start=1) if attempt.completed]
    return attempts[completed[-1] if completed else 0 :]


def read_attempts(path: Path) -> tuple[list[Attempt], int]:
    """All attempts in one rank's file, and how many lines were left unfinished.

    Raises:
        OSError: if it cannot be read.
        RunError: if it is of another version.
    """
    records, torn = read_jsonl(path)
    begins = [number for number, record in enumerate(records) if record.get("kind") == "start"]
    ends = [*begins, len(records)][1:]
    try:
        return [_attempt(records[begin:end]) for begin, end in zip(begins, ends, strict=True)], torn
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RunError(f"{path} was written by another version of accelpact: {error!r}") from error


def _attempt(records: Sequence[Mapping[str, Any]]) -> Attempt:
    start = records[0]
    of_kind = {kind: [one for one in records if one.get("kind") == kind]
               for kind in ("totals", "incident", "checkpoint", "summary")}  # fmt: skip
    summaries = of_kind["summary"]
    return Attempt(
        rank=start["rank"],
        world_size=start["world_size"],
        start=start["time"],
        step=start["step"],
        samples=tuple(map(Sample.from_dict, of_kind["totals"])),
        incidents=tuple(map(from_the_beginning, of_kind["incident"])),
        checkpoints=tuple(one["time"] for one in of_kind["checkpoint"]),
        summary=GoodputSummary.from_dict(summaries[-1]) if summaries else None,
    )


def from_the_beginning(incident: Mapping[str, Any]) -> Mapping[str, Any]:
    """The incident with frontiers that count from the beginning of the run."""
    offset, checkpoint = incident["offset"], incident["checkpoint"]
    shifted = None if checkpoint is None else checkpoint + offset
    return {**incident, "frontier": incident["frontier"] + offset, "checkpoint": shifted}


def unfinished_attempts(path: Path) -> tuple[Attempt, ...]:
    """The earlier attempts at the run that goes on in this file; none if the last one there is done.

    A file of another version counts as none.

    Raises:
        OSError: if it is there and cannot be read.
    """
    if not path.exists():
        return ()
    try:
        attempts, _ = read_attempts(path)
    except RunError:
        return ()
    return () if not attempts or attempts[-1].completed else tuple(_last_run(attempts))

"""One rank's account of a run: the updates, checkpoints and incidents that go with its ledger, for the summary."""

from __future__ import annotations

import math
import time
import warnings
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from lightning_accelpact.goodput.ledger import Ledger, TimeClass, append_jsonl
from lightning_accelpact.goodput.report import GoodputSummary, summarize

if TYPE_CHECKING:
    from lightning_accelpact.recovery.incident import Incident


@dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    """What becomes of the account.

    Args:
        print_summary: Print the summary on rank 0.
        log_dir: Folder for one file of JSON lines per rank, ``goodput-rank<rank>.jsonl``, made if missing and
            appended to. None: no file. A file that cannot be written is a warning.
        restart_seconds: What it takes to relaunch the job and reload a checkpoint, for the estimate of the time
            saved. None counts 0 s and makes the estimate a lower bound.

    Raises:
        ValueError: if ``restart_seconds`` is negative or not finite.
    """

    print_summary: bool = True
    log_dir: str | Path | None = None
    restart_seconds: float | None = None

    def __post_init__(self) -> None:
        seconds = self.restart_seconds
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(
                f"restart_seconds must be a finite number of seconds of at least 0, got {seconds!r};"
                " leave it None if the time of a relaunch and reload is unknown"
            )


class GoodputAccount:
    """Keeps what a summary needs besides the ledger's totals.

    The detection and the redone work that a new incident states are taken out of the ledger's productive time when it
    is taken in, so nobody else may do so.

    Args:
        ledger: Where the time goes.
        options: What becomes of the account.
        rank: Global rank, for the records.
        world_size: Number of ranks, for the records.
    """

    def __init__(self, ledger: Ledger, options: GoodputOptions, *, rank: int = 0, world_size: int = 1) -> None:
        self.ledger = ledger
        self.options = options
        self.rank = rank
        self.world_size = world_size
        self.summary: GoodputSummary | None = None
        # Updates committed since the start, and the frontier from which the current run's are counted on
        self._updates = 0
        self._origin: int | None = None
        # Productive seconds of each update; the frontier and the productive total up to which they are known
        self._update_seconds = array("d")
        self._timed = (0, 0.0)
        # (frontier, wall clock) of every checkpoint that a restart could begin from
        self._checkpoints: list[tuple[int, float]] = []
        self._incidents: list[dict[str, Any]] = []
        self._newest: Incident | None = None

    def count_startup(self, age: float) -> None:
        """The time before the ledger was made went to the program's start, which was ``age`` seconds ago."""
        self.ledger.backdate(TimeClass.PROGRAM_STARTUP, max(0.0, age - self.ledger.elapsed))

    def begin(self, frontier: int, *, resumed: bool = False) -> None:
        """Updates begin.

        Args:
            frontier: The committed frontier now, from which this run's updates count on.
            resumed: Whether a checkpoint has just been read.
        """
        if self._origin is not None and frontier < self._origin + self._updates:
            self._checkpoints.clear()  # this run counts from 0 again, and they bear the numbers of the last one
        if resumed:
            self.checkpoint(frontier)
        self._origin = frontier - self._updates
        self._timed = (frontier, self.ledger.totals()[TimeClass.PRODUCTIVE])

    def checkpoint(self, frontier: int) -> None:
        """From now on there is a checkpoint of this frontier to restart from."""
        self._checkpoints.append((frontier, time.time()))

    def time_update(self, frontier: int) -> None:
        """Take in the productive time of the updates committed since the last call."""
        timed, before = self._timed
        if frontier > timed:
            productive = self.ledger.totals()[TimeClass.PRODUCTIVE]
            self._update_seconds.append((productive - before) / (frontier - timed))
            self._timed = (frontier, productive)

    def take_in(self, incidents: Sequence[Incident]) -> None:
        """Account for the incidents that are new since the last call, and log them.

        Args:
            incidents: All incidents of this rank in the current run.
        """
        if not incidents or incidents[-1] is self._newest:
            return
        begin = next((number for number, one in enumerate(incidents, start=1) if one is self._newest), 0)
        self._newest = incidents[-1]
        new = [self._record_of(incident) for incident in incidents[begin:]]
        self._incidents += new
        self._append([{"kind": "incident", **record} for record in new])

    @property
    def incident_count(self) -> int:
        """Incidents taken in so far, over all runs of this program."""
        return len(self._incidents)

    def _record_of(self, incident: Incident) -> dict[str, Any]:
        """The incident with the frontier of the newest checkpoint that existed when it happened."""
        self.ledger.move(TimeClass.PRODUCTIVE, TimeClass.DETECTION, incident.detect_s)
        self.ledger.move(TimeClass.PRODUCTIVE, TimeClass.REDONE_WORK, incident.redo_s)
        earlier = [
            update for update, when in self._checkpoints if when <= incident.time and update <= incident.frontier
        ]
        return {**incident.to_dict(), "checkpoint": max(earlier, default=None)}

    def record(self, frontier: int, incidents: Sequence[Incident]) -> dict[str, Any]:
        """This rank's part of the summary as plain JSON values; see :func:`~.report.summarize`.

        Args:
            frontier: The committed frontier now.
            incidents: All incidents of this rank in the current run.
        """
        self.take_in(incidents)
        if self._origin is not None:
            self._updates = frontier - self._origin
        totals = self.ledger.totals()
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "elapsed": sum(totals.values()),
            "totals": {cls.value: seconds for cls, seconds in totals.items()},
            "updates": self._updates,
            "update_s": median(self._update_seconds) if self._update_seconds else 0.0,
            "incidents": self._incidents,
        }

    def conclude(self, records: Sequence[Mapping[str, Any]]) -> GoodputSummary:
        """Put the records of the ranks that are known together, and log the summary."""
        self.summary = summarize(records, restart_s=self.options.restart_seconds)
        self._append([{"kind": "summary", "time": time.time(), **self.summary.to_dict()}])
        return self.summary

    def _append(self, records: Sequence[Mapping[str, Any]]) -> None:
        if self.options.log_dir is None:
            return
        path = Path(self.options.log_dir) / f"goodput-rank{self.rank}.jsonl"
        try:
            append_jsonl(path, records)
        except OSError as error:
            # A full disk must neither end a training that is fine nor keep one that fails from its own report
            warnings.warn(f"{len(records)} goodput records could not be written to {path}: {error}", stacklevel=2)

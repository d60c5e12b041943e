"""One rank's account of a run: the updates, checkpoints and incidents that go with its ledger, for the summary."""

from __future__ import annotations

import math
import time
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_accelpact.goodput.ledger import Ledger, TimeClass, append_jsonl
from lightning_accelpact.goodput.openmetrics import MetricsFile
from lightning_accelpact.goodput.report import GoodputSummary, summarize
from lightning_accelpact.goodput.run import Attempt, RankRun, Sample, from_the_beginning, log_path, unfinished_attempts
from lightning_accelpact.goodput.tracking import tracked_values

if TYPE_CHECKING:
    from lightning_accelpact.recovery.incident import Incident

_T = TypeVar("_T")

# The totals so far are kept after each such share of the time that has passed, but within these seconds: a process that
# is killed leaves no more than this unaccounted for, and a day makes no more than some thousand lines
_KEEP_SHARE = 0.01
_KEEP_AFTER_S = (1.0, 30.0)


@dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    """What becomes of the account.

    Args:
        print_summary: Print the summary on rank 0.
        log_dir: Folder of the run, for one file of JSON lines per rank, ``goodput-rank<rank>.jsonl``, made if missing
            and appended to, also by further attempts at the run. None: no file. A file that cannot be written is a
            warning.
        restart_seconds: What it takes to relaunch the job and reload a checkpoint, for the estimate of the time
            saved. None counts 0 s and makes the estimate a lower bound.
        metrics_dir: Folder that Prometheus' node exporter reads (``--collector.textfile.directory``), for one file of
            OpenMetrics text per rank, ``accelpact-rank<rank>.prom``, renewed with the totals. None: no file. A file
            that cannot be written is a warning. Needs prometheus-client (the extra ``metrics``).

    Raises:
        ValueError: if ``restart_seconds`` is negative or not finite.
        ModuleNotFoundError: if ``metrics_dir`` is given without prometheus-client.
    """

    print_summary: bool = True
    log_dir: str | Path | None = None
    restart_seconds: float | None = None
    metrics_dir: str | Path | None = None

    def __post_init__(self) -> None:
        seconds = self.restart_seconds
        if seconds is not None and not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(
                f"restart_seconds must be a finite number of seconds of at least 0, got {seconds!r};"
                " leave it None if the time of a relaunch and reload is unknown"
            )
        if self.metrics_dir is not None:
            MetricsFile.require()


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
        # What to add to a frontier to count from the beginning of the run; None if earlier attempts are not known
        self._offset: int | None = None
        # Earlier attempts at the run, and how far they had come: updates up to there are replays
        self._earlier: tuple[Attempt, ...] = ()
        self._replay_until = 0
        self._replayed = 0
        self._begun = False
        self._kept_at = -math.inf

    def count_startup(self, age: float) -> None:
        """The time before the ledger was made went to the program's start, which was ``age`` seconds ago."""
        self.ledger.backdate(TimeClass.PROGRAM_STARTUP, max(0.0, age - self.ledger.elapsed))

    def begin(self, frontier: int, *, resumed: bool = False, step: int | None = None, reached: int = 0) -> None:
        """Updates begin.

        Args:
            frontier: The committed frontier now, from which this run's updates count on.
            resumed: Whether a checkpoint has just been read.
            step: Updates since the beginning of the run, those of earlier attempts that a checkpoint kept among them.
                None if that is not known: then no update is taken for a replay.
            reached: Updates of the run that earlier attempts have applied, if more is known than this rank's file says.
        """
        self._offset = None if step is None else step - frontier
        if self._origin is not None and frontier < self._origin + self._updates:
            self._checkpoints.clear()  # this run counts from 0 again, and they bear the numbers of the last one
        if resumed:
            self._checkpoints.append((frontier, time.time()))
        self._origin = frontier - self._updates
        self._timed = (frontier, self.ledger.totals()[TimeClass.PRODUCTIVE])
        if not self._begun:
            self._begin_attempt(frontier)
            self._replay_until = max(self._replay_until, reached)

    def _begin_attempt(self, frontier: int) -> None:
        """Learn what earlier attempts at the run had reached, and say that there is another."""
        self._begun = True
        if self.options.log_dir is None:
            return
        path = log_path(self.options.log_dir, self.rank)
        self._earlier = self._guarded(lambda: unfinished_attempts(path), f"read {path}", ())
        self._replay_until = max((attempt.reached for attempt in self._earlier), default=0)
        began = time.time() - self.ledger.elapsed
        place = {"rank": self.rank, "world_size": self.world_size, "step": self._step(frontier)}
        earlier = [{"kind": "incident", **record, "offset": self._offset or 0} for record in self._incidents]
        self._append([{"kind": "start", "time": began, **place}, *earlier])

    def _step(self, frontier: int) -> int | None:
        """Updates since the beginning of the run, None if that is not known."""
        return None if self._offset is None else self._offset + frontier

    def checkpoint(self, frontier: int) -> None:
        """From now on there is a checkpoint of this frontier to restart from."""
        now = time.time()
        self._checkpoints.append((frontier, now))
        if self._begun:
            self._append([{"kind": "checkpoint", "time": now}], durable=False)

    def time_update(self, frontier: int) -> None:
        """Take in the productive time of the updates committed since the last call, and keep the totals now and then.

        The time of updates that an earlier attempt had committed already becomes that of replayed updates.
        """
        timed, before = self._timed
        if frontier > timed:
            productive = self.ledger.totals()[TimeClass.PRODUCTIVE]
            per_update = (productive - before) / (frontier - timed)
            self._update_seconds.append(per_update)
            until = self._replay_until - self._offset if self._offset is not None else 0
            replayed = max(0, min(frontier, until) - timed)
            self._replayed += replayed
            productive -= self.ledger.move(TimeClass.PRODUCTIVE, TimeClass.REPLAYED_UPDATES, replayed * per_update)
            self._timed = (frontier, productive)
        elapsed = self.ledger.elapsed
        shortest, longest = _KEEP_AFTER_S
        # Rather between two updates, where all time of theirs has its class; a long one is not waited for
        after = min(max(shortest, _KEEP_SHARE * elapsed), longest) if frontier > timed else longest
        if elapsed >= self._kept_at + after:
            self._keep(frontier)

    def _keep(self, frontier: int, *, ended: str | None = None) -> None:
        """Write down the totals so far.

        Args:
            frontier: The committed frontier now.
            ended: ``completed`` or ``failed`` at the end.
        """
        if self.options.log_dir is None and self.options.metrics_dir is None:
            return
        self._kept_at = self.ledger.elapsed
        record = self._totals(frontier)
        kept = {"kind": "totals", **self._sample(record, ended)}
        self._append([kept], durable=ended is not None)
        if self.options.metrics_dir is not None:
            file = MetricsFile(Path(self.options.metrics_dir), rank=self.rank)
            done = self._step(frontier)
            self._guarded(lambda: file.write(record, record["updates"] if done is None else done),
                          f"write {file.path}", None)  # fmt: skip

    def _sample(self, record: Mapping[str, Any], ended: str | None) -> dict[str, Any]:
        productive = record["totals"][TimeClass.PRODUCTIVE.value]
        spent = {name: round(seconds, 6) for name, seconds in record["totals"].items() if seconds}
        return {
            "time": time.time(), "totals": spent,
            "updates": record["updates"], "update_s": record["update_s"], "replayed": record["replayed"],
            # Of an update that is not committed yet
            "unfinished_s": max(0.0, productive - self._timed[1]) if self._origin is not None else 0.0,
            "ended": ended,
        }  # fmt: skip

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
        if self._begun:
            self._append([{"kind": "incident", **record} for record in new])
        self._kept_at = -math.inf  # so that the totals right after an incident are kept

    @property
    def incident_count(self) -> int:
        """Incidents taken in so far, over all runs of this program."""
        return len(self._incidents)

    def _record_of(self, incident: Incident) -> dict[str, Any]:
        """The incident with the newest checkpoint that existed when it happened, and what its frontiers count from."""
        self.ledger.move(TimeClass.PRODUCTIVE, TimeClass.DETECTION, incident.detect_s)
        self.ledger.move(TimeClass.PRODUCTIVE, TimeClass.REDONE_WORK, incident.redo_s)
        earlier = [
            update for update, when in self._checkpoints if when <= incident.time and update <= incident.frontier
        ]
        return {**incident.to_dict(), "checkpoint": max(earlier, default=None), "offset": self._offset or 0}

    def record(self, frontier: int, incidents: Sequence[Incident]) -> dict[str, Any]:
        """This rank's part of the summary as plain JSON values; see :func:`~.report.summarize`.

        Args:
            frontier: The committed frontier now.
            incidents: All incidents of this rank in the current run.
        """
        self.take_in(incidents)
        return self._totals(frontier)

    def run_record(self, frontier: int, incidents: Sequence[Incident], *, ended: str) -> dict[str, Any]:
        """Like :meth:`record`, of this attempt and all earlier ones at the run.

        Args:
            frontier: The committed frontier now.
            incidents: All incidents of this rank in the current run.
            ended: ``completed`` or ``failed``.
        """
        record = self.record(frontier, incidents)
        if not self._earlier:
            return record
        offset = self._offset or 0
        now = Attempt(
            rank=self.rank, world_size=self.world_size, start=time.time() - self.ledger.elapsed,
            step=None if self._offset is None or self._origin is None else self._offset + self._origin,
            samples=(Sample.from_dict(self._sample(record, ended)),),
            incidents=tuple(from_the_beginning({**one, "offset": offset}) for one in self._incidents),
            checkpoints=(), summary=None,
        )  # fmt: skip
        return RankRun(rank=self.rank, attempts=(*self._earlier, now)).record()

    def _totals(self, frontier: int) -> dict[str, Any]:
        if self._origin is not None:
            self._updates = frontier - self._origin
        totals = self.ledger.totals()
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "elapsed": sum(totals.values()),
            "totals": {cls.value: seconds for cls, seconds in totals.items()},
            "updates": self._updates,
            "replayed": self._replayed,
            "update_s": median(self._update_seconds) if self._update_seconds else 0.0,
            "incidents": self._incidents,
        }

    def tracked(self, frontier: int, incidents: Sequence[Incident]) -> dict[str, float]:
        """What this rank's time went to so far, for an experiment tracker (``accelerator.log``, ``wandb.log``, ...).

        For all ranks together, gather :meth:`record` and give the records to :func:`~.tracking.tracked_values`.

        Args:
            frontier: The committed frontier now.
            incidents: All incidents of this rank in the current run.
        """
        return tracked_values([self.record(frontier, incidents)])

    def conclude(self, records: Sequence[Mapping[str, Any]], *, completed: bool | None = None) -> GoodputSummary:
        """Put the records of the ranks that are known together, and log the summary.

        Args:
            records: Of :meth:`record`, this rank's among them.
            completed: Whether the run is done, so that a further attempt is a new run; None: if every rank is known.
        """
        if not self._begun:  # it ends before training began
            self._begin_attempt(0)
        done = len(records) == self.world_size if completed is None else completed
        frontier = self._updates + (self._origin or 0)
        self.summary = summarize(records, restart_s=self.options.restart_seconds)
        self._keep(frontier, ended="completed" if done else "failed")
        self._append([{"kind": "summary", "time": time.time(), **self.summary.to_dict()}])
        return self.summary

    def _append(self, records: Sequence[Mapping[str, Any]], *, durable: bool = True) -> None:
        if self.options.log_dir is None:
            return
        path = log_path(self.options.log_dir, self.rank)
        action = f"write {len(records)} goodput records to {path}"
        self._guarded(lambda: append_jsonl(path, records, durable=durable), action, None)

    @staticmethod
    def _guarded(call: Callable[[], _T], action: str, otherwise: _T) -> _T:
        """What the call gives; a full disk must neither end a training that is fine nor keep one from its report."""
        try:
            return call()
        except OSError as error:
            warnings.warn(f"could not {action}: {error}", stacklevel=2)
            return otherwise

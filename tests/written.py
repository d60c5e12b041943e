"""Files as the ranks of a run leave them, made without a run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from lightning_accelpact.goodput import append_jsonl, summarize
from lightning_accelpact.goodput.run import log_path, read_runs
from lightning_accelpact.recovery.incident import Incident

# Seconds of each update, by class
_UPDATE = {"productive": 1.0, "guard": 0.01, "data_loading": 0.05}
_STARTUP = {"program_startup": 4.0, "initialization": 2.0, "training_prep": 1.0}


def write_run(folder: Path, *, ranks: int = 4, updates: int = 120, killed_after: int = 70, saved: int = 60,
              faults: tuple[int, ...] = (20, 45, 95), restart_s: float | None = None, seed: int = 0) -> Path:  # fmt: skip
    """A run that is killed once, with incidents; every second of it adds up.

    Args:
        folder: Where to.
        ranks: How many.
        updates: Committed in the end.
        killed_after: Updates of the first attempt; as many as ``updates`` if there is no second one.
        saved: The update whose checkpoint the second attempt begins at.
        faults: Frontiers at which a fault strikes; each is repaired by a redo.
        restart_s: As of the summary.
        seed: Of what differs between ranks.
    """
    for rank in range(ranks):
        written = _Rank(folder, rank, ranks, random.Random(seed * 1000 + rank), faults)
        written.attempt(1_700_000_000.0, 0, min(killed_after, updates), saved)
        if killed_after < updates:
            written.attempt(written.now + 9.0, saved, updates, -1)
        written.end(updates, restart_s)
    return folder


class _Rank:
    def __init__(self, folder: Path, rank: int, ranks: int, noise: random.Random, faults: tuple[int, ...]) -> None:
        self._path = log_path(folder, rank)
        self._place = {"rank": rank, "world_size": ranks}
        self._noise = noise
        self._faults = set(faults)
        self._reached = 0
        self._seconds: dict[str, float] = {}
        self.now = 0.0

    def attempt(self, start: float, frontier: int, until: int, saved: int) -> None:
        self.now, self._seconds, self._begin = start, {}, frontier
        self._append({"kind": "start", "time": start, "step": frontier, **self._place})
        self._spend(**_STARTUP)
        if frontier:
            self._spend(checkpoint_restore=2.5)
        for update in range(frontier, until):
            self._update(update)
            if update + 1 == saved:
                self._append({"kind": "checkpoint", "time": self.now})
                self._spend(checkpoint_save=1.5)
            self._totals(update + 1)

    def _update(self, update: int) -> None:
        replays = update < self._reached
        for name, seconds in _UPDATE.items():
            name = "replayed_updates" if name == "productive" and replays else name
            self._spend(**{name: seconds * self._noise.uniform(0.9, 1.2)})
        self._reached = max(self._reached, update + 1)
        if update in self._faults:
            self._faults.remove(update)
            self._incident(update)

    def _incident(self, update: int) -> None:
        rank, number = self._place["rank"], 4 - len(self._faults)
        spent = {"detect_s": 0.02, "admit_s": 0.01, "agree_s": 0.03, "retire_s": 0.25, "rebuild_s": 0.12,
                 "rebind_s": 0.002, "validate_s": 0.05}  # fmt: skip
        spent = {name: seconds * self._noise.uniform(0.5, 1.5) for name, seconds in spent.items()}
        incident = Incident(
            rank=rank, number=number, generation=number, time=self.now, phase="backward", frontier=update,
            source="exception" if rank == update % 4 else "notice", reason="RuntimeError: connection reset",
            action="redo", verb="redo", outcome="recovered", redo_s=0.6, redone_micro_batches=2, attempts=1,
            total_s=sum(spent.values()) - spent["detect_s"], **spent,
        )  # fmt: skip
        self._append({"kind": "incident", **incident.to_dict(), "checkpoint": 60 if update > 60 else None, "offset": 0})
        self._spend(detection=spent["detect_s"], group_repair=incident.total_s, redone_work=0.6)

    def _spend(self, **seconds: float) -> None:
        for name, amount in seconds.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + amount
            self.now += amount

    def _totals(self, frontier: int, ended: str | None = None) -> None:
        self._append({"kind": "totals", "time": self.now, "totals": dict(self._seconds),
                      "updates": frontier - self._begin, "update_s": 1.05, "unfinished_s": 0.0, "ended": ended})  # fmt: skip

    def end(self, updates: int, restart_s: float | None) -> None:
        self._spend(other=0.5)
        self._totals(updates, "completed")
        (run,) = read_runs([self._path])
        summary = summarize([run.ranks[0].record()], restart_s=restart_s)
        self._append({"kind": "summary", "time": self.now, **summary.to_dict()})

    def _append(self, record: dict[str, Any]) -> None:
        append_jsonl(self._path, [record], durable=False)

"""The journal of a root folder: which runs have begun there, what checkpoints they have written and how they ended.

``<root>/accelpact/runs.jsonl`` is written by rank 0 alone. Each run has a folder beside it, ``<root>/accelpact/<run>``,
where every rank puts the record of its end and, unless told otherwise, its goodput.
"""

from __future__ import annotations

import json
import os
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_accelpact.goodput.ledger import append_jsonl, read_jsonl
from lightning_accelpact.recovery.checkpoint import sync


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How this process was started.

    Args:
        job: The supervisor's name of the job, which stays the same when it is relaunched; empty without one.
        restarts: How often the supervisor has relaunched it.
        command: The program and its arguments.
        interactive: Whether somebody types the program in, so that the same command may mean another run.
    """

    job: str = ""
    restarts: int = 0
    command: tuple[str, ...] = ()
    interactive: bool = False

    @classmethod
    def from_environment(cls) -> Launch:
        """As torchrun, SLURM and the interpreter tell it."""
        job, restarts = _supervised()
        program, *arguments = sys.argv or [""]
        return cls(
            job=job,
            restarts=restarts,
            command=(os.path.abspath(program), *arguments),
            interactive=hasattr(sys, "ps1") or not hasattr(sys.modules["__main__"], "__file__"),
        )


def _supervised() -> tuple[str, int]:
    """The job's name and the number of its relaunches. torchrun's default name is everybody's and so counts as none."""
    environment = os.environ
    if (name := environment.get("TORCHELASTIC_RUN_ID")) is not None:
        relaunches = int(environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
        requeued = int(environment.get("SLURM_RESTART_COUNT", "0"))
        return ("" if name == "none" else f"torchrun {name}"), relaunches + requeued
    if (name := environment.get("SLURM_JOB_ID")) is not None:
        return f"slurm {name}", int(environment.get("SLURM_RESTART_COUNT", "0"))
    return "", 0


@dataclass(frozen=True, kw_only=True)
class End:
    """How an attempt ended on one rank; one JSON file.

    Args:
        kind: ``fail_stop``: recovery from memory was not possible. ``error``: an error of the program's own.
            ``interrupted``: from the keyboard. ``terminated``: by a signal, as when the job is preempted.
        run: The run.
        attempt: Its attempt, from 0.
        rank: Global rank.
        world_size: Number of ranks.
        time: Unix time.
        exit_code: What the process ends with; ``None`` if that is not known.
        reason: Says what happened, where, and how to go on.
        update: Updates of the run that this rank had applied.
        checkpoint: The newest checkpoint that this attempt has written or begun from, with its update and what a
            restart from it replays; ``None`` without one.
        incident: The last incident; ``None`` without one.
    """

    kind: str
    run: str
    attempt: int
    rank: int
    world_size: int
    time: float
    exit_code: int | None
    reason: str
    update: int
    checkpoint: dict[str, Any] | None
    incident: dict[str, Any] | None


@dataclass(kw_only=True)
class RunRecord:
    """One run as the journal tells it.

    Args:
        run: Its name.
        program: Of all runs that one program makes, in one process after the other; also after a relaunch.
        ordinal: Which of the program's runs it is, from 0.
        job: The supervisor's name of the job.
        command: The program and its arguments.
        attempts: How often it has begun.
        completed: Whether it is done.
        checkpoints: The paths of its checkpoints, the oldest first; some may never have been completed.
        began_from: The checkpoint that the user has named; empty without one.
    """

    run: str
    program: str
    ordinal: int
    job: str
    command: tuple[str, ...]
    attempts: int = 0
    completed: bool = False
    checkpoints: list[str] = field(default_factory=list)
    began_from: str = ""


class Journal:
    """Reads and writes the journal of one root folder.

    Args:
        root: The Trainer's ``default_root_dir``.
    """

    def __init__(self, root: str | Path) -> None:
        self.folder = Path(root).absolute() / "accelpact"
        self._file = self.folder / "runs.jsonl"

    def run_folder(self, run: str) -> Path:
        """Where the ranks of a run put their records."""
        return self.folder / run

    @property
    def exists(self) -> bool:
        """Whether a run has begun there."""
        return self._file.exists()

    def runs(self) -> list[RunRecord]:
        """All runs, in the order in which they have begun last.

        Raises:
            OSError: if the journal is there and cannot be read.
        """
        found: dict[str, RunRecord] = {}
        for record in read_jsonl(self._file)[0] if self._file.exists() else []:
            _take_in(found, record)
        return list(found.values())

    def ends(self, run: RunRecord) -> list[End]:
        """How a run's last attempt ended on each rank that could say so; those of damaged records are left out."""
        files = sorted(self.run_folder(run.run).glob(f"end-attempt{run.attempts - 1}-rank*.json"))
        return [end for end in map(_read_end, files) if end is not None]

    def reached(self, run: RunRecord) -> int:
        """Updates of the run that any rank is known to have applied in any attempt."""
        files = self.run_folder(run.run).glob("end-attempt*-rank*.json")
        return max((end.update for end in map(_read_end, files) if end is not None), default=0)

    def begin(self, record: RunRecord) -> None:
        """A run begins, or another attempt at it."""
        self._append({
            "kind": "begin", "run": record.run, "program": record.program, "ordinal": record.ordinal,
            "job": record.job, "command": list(record.command), "began_from": record.began_from,
        })  # fmt: skip

    def checkpoint(self, run: str, path: Path) -> None:
        """A checkpoint is about to be written there."""
        self._append({"kind": "checkpoint", "run": run, "path": str(path)})

    def completed(self, run: str) -> None:
        """The run is done."""
        self._append({"kind": "completed", "run": run})

    def _append(self, record: dict[str, Any]) -> None:
        append_jsonl(self._file, [{**record, "time": time.time()}])

    def write_end(self, end: End) -> Path:
        """Put one rank's record in its place, whole or not at all.

        Raises:
            OSError: if it cannot be written.
        """
        path = self.run_folder(end.run) / f"end-attempt{end.attempt}-rank{end.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.part")
        unfinished.write_text(json.dumps(vars(end), indent=1))
        sync(unfinished)
        unfinished.rename(path)
        return path


def _take_in(found: dict[str, RunRecord], record: dict[str, Any]) -> None:
    run = found.get(record.get("run", ""))
    kind = record.get("kind")
    if kind == "begin":
        if run is None:
            names = ("run", "program", "ordinal", "job", "began_from")
            run = RunRecord(command=tuple(record["command"]), **{name: record[name] for name in names})
        else:
            found.pop(run.run)
        run.attempts += 1
        run.completed = False
        found[run.run] = run  # the one that has begun last is the last one
    elif kind == "checkpoint" and run is not None:
        run.checkpoints = [path for path in run.checkpoints if path != record["path"]] + [record["path"]]
    elif kind == "completed" and run is not None:
        run.completed = True


def _read_end(path: Path) -> End | None:
    try:
        return End(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        return None


def new_name() -> str:
    """A name for a run or a program, in the order of time."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}"

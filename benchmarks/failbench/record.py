"""What one run of a cell has measured: a line of JSON, the only interface between the runner and everything offline."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.failbench.cell import NO_FAULT, Cell


class Outcome(StrEnum):
    """What became of the run."""

    RECOVERED = "recovered"
    """The mechanism restored the state of the lost ranks, and training ran to its last step."""
    CONTINUED = "continued"
    """The architecture went on by itself, without its lost ranks (native degradation), to its last step."""
    UNDISTURBED = "undisturbed"
    """There was no fault, and training ran to its last step."""
    HALTED = "halted"
    """The survivors noticed the loss and ended: what is expected without a mechanism."""
    INFEASIBLE = "infeasible"
    """The mechanism cannot work on this architecture; ``reason`` says why. Nothing was run."""
    DEGENERATE = "degenerate"
    """The mechanism does nothing of its own here; ``reason`` says what it comes to. Nothing was run."""
    FAILED = "failed"
    """Anything else, such as a run that was not over in time; ``reason`` says what."""


class Evidence(StrEnum):
    """What the figures of a record rest on."""

    MEASURED = "measured"
    """Clocks of a run whose recovery, continuation or halt was executed and seen."""
    ANALYTIC = "analytic"
    """A formula, as for most cells of the paper."""
    INFEASIBLE = "infeasible"
    """There is nothing to measure."""


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault of the schedule.

    Args:
        kind: ``kill`` (SIGKILL), ``hang`` (SIGSTOP) or ``preempt`` (a warning, then SIGKILL).
        rank: Victim.
        step: Step at whose beginning it strikes, counted from 0.
        planned_s: When it was due, seconds since the run's first step began on the victim; None if its schedule has a
            step only.
        actual_s: When it struck, on the same clock; None if it never did.
        warning_s: Seconds of warning that came before it.
    """

    kind: str
    rank: int
    step: int
    planned_s: float | None = None
    actual_s: float | None = None
    warning_s: float = 0.0

    @property
    def skew_s(self) -> float | None:
        """How late it struck, seconds."""
        return None if self.planned_s is None or self.actual_s is None else self.actual_s - self.planned_s


@dataclass(frozen=True, kw_only=True)
class Record:
    """One run of a cell. Figures that were not observed are None or empty, never 0.

    Lists with one entry for each recovery (``detect_seconds`` and the following) are in the order of the recoveries;
    two faults that are recovered from together (trace F2) share one entry.

    Args:
        cell: What was run.
        seed: Of workload and schedule.
        preset: Size of the workload.
        versions: ``python``, ``torch``, and what else the figures depend on (such as ``backend`` and ``device``).
        world_size: Ranks at the start.
        outcome: What became of it.
        evidence: What the figures rest on.
        reason: Why, unless ``outcome`` says it all.
        faults: The schedule, and what came of it.
        state_bytes_per_rank: What a mechanism saves of a rank: model, optimizer, RNG and data position; the largest.
        save_interval_steps: Steps from one save of the mechanism to the next; None if it saves nothing in advance.
        detect_timeout_seconds: What the process groups were told to wait for a silent peer.
        steps: Committed at the end of the run.
        samples_per_step: Of all ranks together, before a fault.
        step_seconds_before: Wall time of each step before the first fault, warm-up left out, on the rank that timed
            the run.
        step_seconds_after: Of each step after the last recovery.
        steady_overhead: Share of throughput lost while nothing fails (0.0048 is 0.48 %), against the architecture's
            steps without a mechanism; the aggregation fills it in.
        save_seconds: How long training stood still for each save in advance (so none for a mechanism that waits for a
            warning).
        emergency_seconds: How long each save upon a warning took; contained in ``restore_seconds`` as well.
        detect_seconds: Fault until the last survivor knew, for each recovery.
        restore_seconds: Effective restore: reading or receiving the state and loading it, and the emergency save of a
            warned mechanism.
        reform_seconds: New process groups among the ranks that go on.
        respawn_seconds: New processes for the lost ranks, until they could join.
        recover_seconds: Fault until the first step after it had been committed.
        fresh_starts: Recoveries that had nothing left to restore, so that training began again at step 0.
        lost_steps: Steps that were run again.
        lost_seconds: What they had taken.
        throughput_before: Samples a second before the first fault.
        throughput_after: Samples a second after the last recovery.
        losses: Of each committed step.
        weights_sha256: Of all ranks' final weights together; None if the run did not end.
        world_after: Ranks at the end.
    """

    cell: Cell
    seed: int
    preset: str
    versions: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 0
    outcome: Outcome
    evidence: Evidence
    reason: str = ""
    faults: tuple[InjectedFault, ...] = ()
    state_bytes_per_rank: int | None = None
    save_interval_steps: int | None = None
    detect_timeout_seconds: float | None = None
    steps: int = 0
    samples_per_step: int | None = None
    step_seconds_before: tuple[float, ...] = ()
    step_seconds_after: tuple[float, ...] = ()
    steady_overhead: float | None = None
    save_seconds: tuple[float, ...] = ()
    emergency_seconds: tuple[float, ...] = ()
    detect_seconds: tuple[float, ...] = ()
    restore_seconds: tuple[float, ...] = ()
    reform_seconds: tuple[float, ...] = ()
    respawn_seconds: tuple[float, ...] = ()
    recover_seconds: tuple[float, ...] = ()
    fresh_starts: int = 0
    lost_steps: int | None = None
    lost_seconds: float | None = None
    throughput_before: float | None = None
    throughput_after: float | None = None
    losses: tuple[float, ...] = ()
    weights_sha256: str | None = None
    world_after: int | None = None

    @property
    def ended(self) -> bool:
        """Whether training came to its last step."""
        return self.outcome in (Outcome.RECOVERED, Outcome.CONTINUED, Outcome.UNDISTURBED)

    @property
    def recovery_measured(self) -> bool:
        """Whether a recovery, or going on without the lost ranks, was executed and seen."""
        survived = self.outcome in (Outcome.RECOVERED, Outcome.CONTINUED)
        return survived and self.cell.trace != NO_FAULT and self.evidence is Evidence.MEASURED

    def to_json(self) -> str:
        """One line, without the newline."""
        return json.dumps({**asdict(self), "cell": str(self.cell)}, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Record:
        """The record of a line of :meth:`to_json`.

        Raises:
            ValueError: if it is no record of this version.
        """
        values = json.loads(line)
        try:
            return cls(**{name: _read(name, value) for name, value in values.items()})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"not a record of this version of FailBench: {error}; line: {line[:200]}") from error


_LISTS = tuple(one.name for one in fields(Record) if str(one.type) == "tuple[float, ...]")


def _read(name: str, value: Any) -> Any:
    """A field's value from its JSON form."""
    readers = {
        "cell": Cell.parse,
        "outcome": Outcome,
        "evidence": Evidence,
        "faults": lambda faults: tuple(InjectedFault(**fault) for fault in faults),
    }
    if name in _LISTS:
        return tuple(value)
    return readers[name](value) if name in readers else value


def append_record(path: Path, record: Record) -> None:
    """Add a record to a file of JSON lines, made with its folder if missing.

    What a killed writer left of a line is cut off.

    Raises:
        OSError: if it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(record.to_json().encode() + b"\n")


def read_records(paths: Iterable[Path]) -> list[Record]:
    """The records of files of JSON lines. A last line without its newline, of a writer that was killed, is left out.

    Raises:
        OSError: if a file cannot be read.
        ValueError: if a line is no record; the message names file and line.
    """
    records = []
    for path in paths:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]
        for number, line in enumerate(lines, start=1):
            try:
                records.append(Record.from_json(line))
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return records

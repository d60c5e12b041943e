"""Many cells, one after the other or several at once, into a file from which an interrupted matrix goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from benchmarks.failbench import compatibility
from benchmarks.failbench.aggregation import RunKey, run_key
from benchmarks.failbench.cell import NO_FAULT, NO_MECHANISM, Cell
from benchmarks.failbench.compatibility import Kind
from benchmarks.failbench.record import Evidence, Outcome, Record, append_record, read_records

# The paper measures this one without a mechanism only (section VI): it is an architecture that goes on by itself
BARE_ARCHITECTURES = ("A1-async",)
# Where the paper varies the timeout (Table VI)
_TIMED = "A2"


@dataclass(frozen=True)
class Task:
    """One run.

    Args:
        cell: What to run.
        seed: Of workload and schedule.
        detect_timeout_s: What the process groups are told to wait for a silent peer; None for the preset's.
    """

    cell: Cell
    seed: int
    detect_timeout_s: float | None = None

    def key(self, preset: str) -> RunKey:
        """That of its record."""
        return self.cell, self.seed, preset, self.detect_timeout_s


Measure = Callable[[Task], Record]


def plan(
    architectures: Sequence[str],
    mechanisms: Sequence[str],
    traces: Sequence[str],
    *,
    seeds: int,
    hang_timeouts_s: Sequence[float],
) -> list[Task]:
    """What to run: all combinations, and for each architecture a run without mechanism and fault to compare with.

    Args:
        architectures: Names; :data:`BARE_ARCHITECTURES` are run without a mechanism only, unless there are no others.
        mechanisms: Names.
        traces: Names.
        seeds: Runs of each cell, with the seeds from 0 on.
        hang_timeouts_s: Timeouts with which each cell of the trace ``hang`` is run. A2 without a mechanism is one of
            these cells, if A2 is among the architectures.

    Raises:
        ValueError: if ``seeds`` is less than 1.
    """
    if seeds < 1:
        raise ValueError(f"seeds={seeds} must be at least 1")
    cells = [Cell(name, NO_MECHANISM, NO_FAULT) for name in architectures]
    cells += [cell for cell in compatibility.cells(architectures, mechanisms, traces) if _wanted(cell, architectures)]
    cells += [Cell(_TIMED, NO_MECHANISM, "hang")] if _TIMED in architectures else []
    return [
        Task(cell, seed, timeout)
        for cell in dict.fromkeys(cells)
        for timeout in (hang_timeouts_s if cell.trace == "hang" else (None,))
        for seed in range(seeds)
    ]


def _wanted(cell: Cell, architectures: Sequence[str]) -> bool:
    bare = cell.architecture in BARE_ARCHITECTURES and cell.mechanism != NO_MECHANISM
    return not bare or set(architectures) <= set(BARE_ARCHITECTURES)


@dataclass(frozen=True)
class Matrix:
    """Tasks and the file that their records go to.

    Args:
        tasks: What to run.
        preset: Name of the preset.
        path: File of JSON lines; what it has of the tasks already is not run again.
        measure: Runs one task.
    """

    tasks: Sequence[Task]
    preset: str
    path: Path
    measure: Measure

    def pending(self, *, retry: bool = False) -> list[Task]:
        """Tasks without a record.

        Args:
            retry: Count those, too, whose last record says that they failed.

        Raises:
            OSError: if the file cannot be read.
            ValueError: if it has a line that is no record.
        """
        records = read_records([self.path]) if self.path.exists() else []
        done = {run_key(one): one.outcome for one in records}
        return [task for task in self.tasks if _open(done.get(task.key(self.preset)), retry)]

    def run(self, tasks: Iterable[Task], *, jobs: int = 1) -> Iterator[tuple[Task, Record]]:
        """Run tasks and yield each with its record, which is in the file by then.

        Interrupted (Ctrl-C), it loses only the runs that are under way.

        Args:
            tasks: Which.
            jobs: How many at once, each with all of its ranks.

        Raises:
            OSError: if the file cannot be written.
        """
        for task, record in self._one_by_one(tasks) if jobs == 1 else self._at_once(tasks, jobs):
            append_record(self.path, record)
            yield task, record

    def _one_by_one(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Record]]:
        return ((task, carry_out(task, self.preset, self.measure)) for task in tasks)

    def _at_once(self, tasks: Iterable[Task], jobs: int) -> Iterator[tuple[Task, Record]]:
        with ThreadPoolExecutor(jobs) as pool:
            running: dict[Future[Record], Task] = {
                pool.submit(carry_out, task, self.preset, self.measure): task for task in tasks
            }
            try:
                while running:
                    ended, _ = wait(running, return_when=FIRST_COMPLETED)
                    yield from ((running.pop(one), one.result()) for one in ended)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)


def carry_out(task: Task, preset: str, measure: Measure) -> Record:
    """Run a task; if it cannot be run, or breaks, the record says so.

    Args:
        task: What to run.
        preset: Name of the preset.
        measure: Runs a task that can be run.
    """
    found = compatibility.here(task.cell.architecture, task.cell.mechanism)
    if found.kind is not Kind.VIABLE:
        return _not_run(task, preset, found.kind, found.reason)
    try:
        return measure(task)
    except (
        Exception
    ) as error:  # whatever breaks in one cell, possibly in a user's own class: the others are still worth running
        return _bare(task, preset, Outcome.FAILED, Evidence.MEASURED, f"{type(error).__name__}: {error}")


def _open(outcome: Outcome | None, retry: bool) -> bool:
    return outcome is None or (retry and outcome is Outcome.FAILED)


def _not_run(task: Task, preset: str, kind: Kind, reason: str) -> Record:
    outcome = Outcome.DEGENERATE if kind is Kind.DEGENERATE else Outcome.INFEASIBLE
    return _bare(task, preset, outcome, Evidence.INFEASIBLE, reason)


def _bare(task: Task, preset: str, outcome: Outcome, evidence: Evidence, reason: str) -> Record:
    """A record without figures."""
    return Record(
        cell=task.cell,
        seed=task.seed,
        preset=preset,
        detect_timeout_seconds=task.detect_timeout_s,
        outcome=outcome,
        evidence=evidence,
        reason=reason,
    )

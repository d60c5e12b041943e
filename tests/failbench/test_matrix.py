"""A matrix runs what is missing, keeps what it has, and goes on after anything."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from failbench_records import made

from benchmarks.failbench.cell import PAPER_ARCHITECTURES, PAPER_MECHANISMS, PAPER_TRACES, Cell
from benchmarks.failbench.matrix import Matrix, Task, plan
from benchmarks.failbench.record import Outcome, Record, read_records

FIVE = [Task(Cell("A2", "FT1", "F1"), seed) for seed in range(5)]


class Runner:
    """Makes records; breaks where it is told to."""

    def __init__(self, *, breaks_at: int | None = None, error: type[BaseException] = RuntimeError) -> None:
        self.ran: list[Task] = []
        self._breaks_at, self._error = breaks_at, error

    def __call__(self, task: Task) -> Record:
        if len(self.ran) == self._breaks_at:
            raise self._error("it broke")
        self.ran.append(task)
        timed = {} if task.detect_timeout_s is None else {"detect_timeout_seconds": task.detect_timeout_s}
        return made(str(task.cell), seed=task.seed, **timed)


def matrix(path: Path, runner: Runner, tasks: list[Task] = FIVE) -> Matrix:
    return Matrix(tasks, "tiny", path / "records.jsonl", runner)


def test_an_interrupted_matrix_goes_on(tmp_path: Path) -> None:
    first = matrix(tmp_path, Runner(breaks_at=2, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        list(first.run(first.pending()))
    assert len(read_records([first.path])) == 2

    runner = Runner()
    second = matrix(tmp_path, runner)
    assert second.pending() == FIVE[2:]
    list(second.run(second.pending()))
    assert runner.ran == FIVE[2:]
    assert [one.seed for one in read_records([second.path])] == [0, 1, 2, 3, 4]
    assert second.pending() == []


def test_a_killed_writers_half_line_is_run_again(tmp_path: Path) -> None:
    one = matrix(tmp_path, Runner())
    list(one.run(FIVE[:2]))
    one.path.write_text(one.path.read_text()[:-20])
    assert one.pending() == FIVE[1:]
    list(one.run(one.pending()))
    assert [record.seed for record in read_records([one.path])] == [0, 1, 2, 3, 4]


def test_what_breaks_is_recorded_and_the_rest_is_run(tmp_path: Path) -> None:
    class BreaksOnce(Runner):
        def __call__(self, task: Task) -> Record:
            if task.seed == 1:
                raise OSError("no room left")
            return super().__call__(task)

    one = matrix(tmp_path, BreaksOnce())
    outcomes = [record.outcome for _, record in one.run(one.pending())]
    assert outcomes.count(Outcome.RECOVERED) == 4
    (failed,) = [record for record in read_records([one.path]) if record.outcome is Outcome.FAILED]
    assert (failed.seed, failed.reason) == (1, "OSError: no room left")
    assert one.pending() == []
    assert one.pending(retry=True) == [FIVE[1]]


def test_infeasible_and_degenerate_cells_have_records_and_no_runs(tmp_path: Path) -> None:
    runner = Runner()
    tasks = [Task(Cell("A4", "FT7", "F1"), 0), Task(Cell("A4", "FT10", "F1"), 0)]
    one = matrix(tmp_path, runner, tasks)
    assert [record.outcome for _, record in one.run(tasks)] == [Outcome.DEGENERATE, Outcome.INFEASIBLE]
    assert runner.ran == []
    assert one.pending() == []
    assert all(record.reason.endswith(".") for record in read_records([one.path]))


def test_several_at_once(tmp_path: Path) -> None:
    together = threading.Barrier(5, timeout=20)

    class Waits(Runner):
        def __call__(self, task: Task) -> Record:
            together.wait()
            return super().__call__(task)

    one = matrix(tmp_path, Waits())
    assert sorted(task.seed for task, _ in one.run(FIVE, jobs=5)) == [0, 1, 2, 3, 4]
    assert one.pending() == []


def test_hangs_with_two_timeouts_are_two_runs(tmp_path: Path) -> None:
    tasks = plan(["A2"], ["FT9"], ["F1"], seeds=1, hang_timeouts_s=[1.0, 2.0])
    one = matrix(tmp_path, Runner(), tasks)
    list(one.run(tasks[:-1]))
    assert one.pending() == [Task(Cell("A2", "FT9", "hang"), 0, 2.0)]


def cells(tasks: list[Task]) -> Iterator[str]:
    return (str(task.cell) for task in tasks)


def test_the_plan_has_the_papers_table_and_what_it_is_compared_with() -> None:
    tasks = plan(PAPER_ARCHITECTURES, PAPER_MECHANISMS, PAPER_TRACES, seeds=2, hang_timeouts_s=[1.0, 2.0])
    assert len(tasks) == len(set(tasks)) == 2 * (189 + 7 + 2)
    assert {f"{name}/FT9/none" for name in PAPER_ARCHITECTURES} < set(cells(tasks))


def test_the_asynchronous_parameter_server_is_run_bare() -> None:
    tasks = plan(["A1-async", "A2"], ["FT1", "FT9"], ["F1"], seeds=1, hang_timeouts_s=[1.0])
    assert [cell for cell in cells(tasks) if "async" in cell] == ["A1-async/FT9/none", "A1-async/FT9/F1"]
    alone = plan(["A1-async"], ["FT1"], ["F1"], seeds=1, hang_timeouts_s=[1.0])
    assert list(cells(alone)) == ["A1-async/FT9/none", "A1-async/FT1/F1"]


def test_no_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="seeds=0"):
        plan(["A2"], ["FT1"], ["F1"], seeds=0, hang_timeouts_s=[])

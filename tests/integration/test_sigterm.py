"""One rank is told to end: all of them leave after the same update, at once."""

from __future__ import annotations

from typing import Any

import jobs_sigterm
import pytest
from cluster import run_ranks, values

from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint

PROMPT = 20.0  # seconds; far less than the 30 after which a rank that is left alone gives up


def assert_left_together(results: list[dict[str, Any]], updates: int) -> None:
    assert {result["ended"] for result in results} == {"SIGTERMException None"}
    assert {result["updates"] for result in results} == {updates}
    assert all(result["seconds"] < PROMPT for result in results)


@pytest.mark.parametrize(
    ("rank", "hook", "batch", "updates"),
    [
        (2, "on_train_batch_start", 3, 2),  # in the second update, which it finishes
        (0, "on_train_batch_end", 2, 2),  # between two micro-batches
        (1, "on_validation_batch_start", 0, 3),  # the validation ends as well
        (None, "on_train_batch_start", 3, 2),  # the supervisor tells every rank
        (3, "on_train_batch_end", 11, 6),  # after the last update
    ],
    ids=["in-an-update", "between-micro-batches", "in-validation", "all-ranks", "at-the-end"],
)
def test_all_ranks_leave_after_the_same_update(rank: int | None, hook: str, batch: int, updates: int) -> None:
    results = values(run_ranks(jobs_sigterm.fit_with, 4, {"rank": rank, "hook": hook, "batch": batch}))
    assert_left_together(results, updates)
    assert not any(result["incidents"] for result in results)


@pytest.mark.parametrize("point", [FaultPoint.BACKWARD, FaultPoint.VOTE, FaultPoint.STEP])
@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION, FaultKind.SOCKETS], ids=lambda kind: kind.value)
def test_a_fault_in_the_last_update_parts_nobody(point: FaultPoint, kind: FaultKind) -> None:
    """Some ranks see the vote pass, others repair: they find out alike that they are to leave."""
    fault = Fault(point=point, update=1, rank=0, kind=kind)
    options = {"rank": 2, "hook": "on_train_batch_start", "batch": 3, "faults": [fault]}
    assert_left_together(values(run_ranks(jobs_sigterm.fit_with, 4, options)), 2)


def test_a_rank_that_is_told_of_a_repair_before_it_votes_has_said_that_it_is_to_leave() -> None:
    """If all have their gradients by then, the update is rolled forward without its vote."""
    fault = Fault(point=FaultPoint.VOTE, update=1, rank=0, kind=FaultKind.EXCEPTION)
    options = {"rank": 2, "hook": "on_train_batch_start", "batch": 3, "faults": [fault], "late_voter": (2, 1)}
    results = values(run_ranks(jobs_sigterm.fit_with, 4, options))
    assert_left_together(results, 2)
    (action,) = {result["incidents"][0]["action"] for result in results}
    assert action in ("roll_forward", "retry")  # the latter if a rank was still in the last collective


def test_an_evaluation_ends_too() -> None:
    results = values(run_ranks(jobs_sigterm.validate_with, 4, {"rank": 1, "hook": "on_validation_batch_start", "batch": 1}))
    assert {result["ended"] for result in results} == {"SIGTERMException None"}
    assert {result["batches"] for result in results} == {2}


def test_the_process_ends_without_an_error() -> None:
    """As Lightning has it: its exception is a SystemExit that carries no code."""
    options = {"rank": 3, "hook": "on_train_batch_start", "batch": 2}
    results = run_ranks(jobs_sigterm.fit_to_the_end_of_the_process, 4, options, timeout=60)
    assert [result.exit_code for result in results] == [0] * 4
    assert all("SIGTERMException" in result.error for result in results)

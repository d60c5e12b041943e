"""Plain loops under Accelerate: what a fault in any place of them leaves is bit for bit what it would be without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs_accelerate
import pytest
from cluster import RankResult, run_ranks, values

from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint
from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE

EXCEPTION, SOCKETS = FaultKind.EXCEPTION, FaultKind.SOCKETS


def ranks(name: str, *args: Any, reuse: bool = True, **options: Any) -> list[RankResult]:
    """A job on four ranks."""
    return run_ranks(jobs_accelerate.call, 4, name, args, options, reuse=reuse)


@pytest.fixture(scope="module")
def undisturbed() -> Callable[..., list[dict[str, Any]]]:
    """The results of a job without a fault, made once."""
    known: dict[str, list[dict[str, Any]]] = {}

    def run(name: str, *args: Any, **options: Any) -> list[dict[str, Any]]:
        key = repr((name, args, sorted(options.items())))
        if key not in known:
            known[key] = values(ranks(name, *args, reuse=False, **options))
            assert all(not result["incidents"] for result in known[key])
        return known[key]

    return run


Results = list[dict[str, Any]]


def same(results: Results, expected: Results, *, but: tuple[str, ...] = ()) -> Results:
    """Compare all that must not differ; returns the incidents, of which every rank has recovered."""
    for rank, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert result["pending"] == []
        for key in set(wanted) - {"incidents", "pending", *but}:
            assert result[key] == wanted[key], f"rank {rank}: {key} differs"
    found = [incident for result in results for incident in result["incidents"]]
    assert {incident["rank"] for incident in found} == {0, 1, 2, 3}
    assert all(incident["outcome"] == "recovered" for incident in found)
    assert all(incident["stale_references"] == 0 < incident["references"] for incident in found)
    return found


def at(point: FaultPoint, update: int, micro_batch: int | None = None) -> dict[str, Any]:
    return {"point": point, "update": update, "micro_batch": micro_batch}


PLACES = {
    "before-first-forward": at(FaultPoint.START, 0),
    "start": at(FaultPoint.START, 2),
    "first-forward": at(FaultPoint.FORWARD, 2, 0),
    "last-forward": at(FaultPoint.FORWARD, 2),
    "first-backward": at(FaultPoint.BACKWARD, 2, 0),
    "last-backward": at(FaultPoint.BACKWARD, 2),
    "last-all-reduce": at(FaultPoint.ALL_REDUCE, 2),
    "vote": at(FaultPoint.VOTE, 2),
    "step": at(FaultPoint.STEP, 2),
    "boundary": at(FaultPoint.BOUNDARY, 2),
}
WITH_ONE = [place for place in PLACES if not place.startswith("first")]  # accumulating one micro-batch, it is the last


@pytest.mark.parametrize(
    ("accumulate", "place"), [*((4, place) for place in PLACES), *((1, place) for place in WITH_ONE)]
)
@pytest.mark.parametrize(("kind", "victim"), [(EXCEPTION, 3), (SOCKETS, 0)], ids=["exception", "sockets"])
def test_one_fault_changes_nothing(
    accumulate: int, place: str, kind: FaultKind, victim: int, undisturbed: Any
) -> None:
    fault = Fault(kind=kind, rank=victim, **PLACES[place])
    found = same(
        values(ranks("train", [fault], accumulate=accumulate)), undisturbed("train", accumulate=accumulate)
    )
    if kind is SOCKETS:  # the collectives that failed have run again, and no iteration has
        assert all(incident["redone_micro_batches"] == 0 for incident in found)


@pytest.mark.parametrize("place", ["first-forward", "last-backward", "last-all-reduce", "vote"])
def test_one_fault_is_redone_where_retries_are_not_allowed(place: str, undisturbed: Any) -> None:
    fault = Fault(kind=SOCKETS, rank=0, **PLACES[place])
    found = same(
        values(ranks("train", [fault], accumulate=4, uncommitted="redo")), undisturbed("train", accumulate=4)
    )
    assert "retry" not in {incident["action"] for incident in found}


def test_faults_in_a_row_and_in_a_replay(undisturbed: Any) -> None:
    faults = [
        Fault(kind=EXCEPTION, rank=3, **at(FaultPoint.BACKWARD, 1, 2)),
        Fault(kind=EXCEPTION, rank=0, **at(FaultPoint.FORWARD, 1, 3)),
        Fault(kind=SOCKETS, rank=1, **at(FaultPoint.BACKWARD, 2)),
        Fault(kind=EXCEPTION, rank=2, **at(FaultPoint.VOTE, 3)),
        Fault(kind=EXCEPTION, rank=0, **at(FaultPoint.BACKWARD, 4)),
    ]
    same(values(ranks("train", faults, accumulate=4)), undisturbed("train", accumulate=4))


@pytest.mark.parametrize("point", [FaultPoint.BACKWARD, FaultPoint.VOTE, FaultPoint.STEP])
def test_an_update_that_is_a_function_runs_again(point: FaultPoint, undisturbed: Any) -> None:
    fault = Fault(kind=EXCEPTION, rank=3, **at(point, 2))
    same(values(ranks("by_function", [fault])), undisturbed("by_function"))


def test_a_loop_that_says_nothing_survives_lost_links(undisturbed: Any) -> None:
    fault = Fault(kind=SOCKETS, rank=3, **at(FaultPoint.BACKWARD, 2))
    found = same(values(ranks("by_function", [fault], protected=False)), undisturbed("by_function", protected=False))
    assert {incident["action"] for incident in found} == {"retry"}


def test_a_loop_that_says_nothing_stops_where_an_update_would_have_to_run_again() -> None:
    fault = Fault(kind=EXCEPTION, rank=3, **at(FaultPoint.BACKWARD, 2))
    results = ranks("by_function", [fault], protected=False)
    assert [result.exit_code for result in results] == [FAIL_STOP_EXIT_CODE] * 4
    for result in results:
        assert "neither in `with accelerator.accumulate(model):`" in result.error


def test_a_loop_that_ends_before_its_update_has_run_again_is_an_error() -> None:
    fault = Fault(kind=EXCEPTION, rank=3, **at(FaultPoint.BACKWARD, 2))
    results = ranks("counting_iterations", [fault])
    assert [result.exit_code for result in results] == [FAIL_STOP_EXIT_CODE] * 4
    assert any("let it end after a number of updates" in result.error for result in results)


@pytest.mark.parametrize("point", [FaultPoint.BACKWARD, FaultPoint.VOTE, FaultPoint.BOUNDARY])
def test_steps_and_collectives_may_follow_the_context(point: FaultPoint, undisturbed: Any) -> None:
    fault = Fault(kind=EXCEPTION, rank=3, **at(point, 2))
    results = values(ranks("after_the_context", [fault]))
    same(results, undisturbed("after_the_context"), but=("iterations",))
    extra = 2 if point is FaultPoint.BACKWARD else 0
    assert {tuple(result["iterations"]) for result in results} == {(10 + extra,) * 4}


@pytest.mark.parametrize("fault", [at(FaultPoint.BACKWARD, 2, 0), at(FaultPoint.BACKWARD, 2), at(FaultPoint.START, 2)])
@pytest.mark.parametrize("kind", [EXCEPTION, SOCKETS], ids=lambda kind: kind.value)
def test_batches_that_the_main_process_hands_out(fault: dict[str, Any], kind: FaultKind, undisturbed: Any) -> None:
    fault = Fault(kind=kind, rank=3, **fault)
    same(values(ranks("dispatched", [fault])), undisturbed("dispatched"))


@pytest.mark.parametrize("victim", [0, 3])
def test_collectives_between_updates_run_again(victim: int, undisturbed: Any) -> None:
    results = values(ranks("operations", victim, reuse=False))
    same(results, undisturbed("operations"))
    for result in results:
        assert set(result["values"]) == set(jobs_accelerate.OPERATIONS)
        assert len(result["incidents"]) == len(jobs_accelerate.OPERATIONS)


def test_faults_while_a_checkpoint_is_written_and_read(tmp_path: Path) -> None:
    fault = Fault(point=FaultPoint.BOUNDARY, update=0, rank=3, kind=SOCKETS)
    plain = values(ranks("checkpoints", str(tmp_path / "plain"), reuse=False))
    broken = values(ranks("checkpoints", str(tmp_path / "broken"), fault, fault, reuse=False))
    same(broken, plain)
    for result in plain:
        assert result["digests"][1] == result["digests"][2] != result["digests"][0]


def test_mixed_precision(undisturbed: Any) -> None:
    options = {"accelerator": {"mixed_precision": "bf16"}, "normalized": False}
    fault = Fault(kind=EXCEPTION, rank=3, **at(FaultPoint.BACKWARD, 2))
    results = values(ranks("train", [fault], reuse=False, **options))  # Accelerate has one precision per process
    same(results, undisturbed("train", **options))


def test_the_account_is_printed_and_logged() -> None:
    fault = Fault(kind=EXCEPTION, rank=3, **at(FaultPoint.BACKWARD, 2))
    results = ranks("reported", [fault])
    for result in values(results):
        assert len(result["summary"]["incidents"]) == 1
    main = results[0].value  # the only one that has trackers
    assert main["finished"]
    assert [entry["step"] for entry in main["logged"]] == [0, 4]
    assert all(0 < entry["goodput"] < 1 for entry in main["logged"])
    assert main["logged"][-1]["goodput/incidents"] == 1
    assert "recovered" in results[0].output
    assert all("recovered" not in result.output for result in results[1:])


def test_loaders_that_would_leave_ranks_waiting_are_refused() -> None:
    for message in values(ranks("uneven")):
        assert "gives its 3 batches unevenly to 4 processes" in message

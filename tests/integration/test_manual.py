"""Manual optimization: updates given as functions run again exactly; what could not be run again is refused."""

from __future__ import annotations

from typing import Any

import jobs_manual
import pytest
from cluster import RankResult, run_ranks, values

from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint
from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE

PLACES: dict[str, dict[str, Any]] = {
    "before the first forward": {"point": FaultPoint.START, "update": 0},
    "first forward": {"point": FaultPoint.FORWARD, "update": 1, "micro_batch": 0},
    "last backward": {"point": FaultPoint.BACKWARD, "update": 2},
    "vote": {"point": FaultPoint.VOTE, "update": 1},
    "step": {"point": FaultPoint.STEP, "update": 1},
    "boundary": {"point": FaultPoint.BOUNDARY, "update": 2},
}


def fit(**options: Any) -> list[RankResult]:
    return run_ranks(jobs_manual.fit_with, 4, options)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[str, list[dict[str, Any]]]:
    """The runs without faults, by manner, on every rank."""
    return {manner: values(fit(manner=manner)) for manner in ("apart", "together", "accumulated")}


@pytest.mark.parametrize("manner", ["apart", "together", "accumulated"])
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_in_a_pair_of_optimizers_changes_nothing(place: str, manner: str, uninterrupted: Any) -> None:
    number = list(PLACES).index(place) + ["apart", "together", "accumulated"].index(manner)
    fault = Fault(rank=[0, 3][number // 2 % 2], kind=list(FaultKind)[number % 2], **PLACES[place])
    for rank, (result, wanted) in enumerate(zip(values(fit(manner=manner, faults=[fault])), uninterrupted[manner], strict=True)):
        assert result["compared"] == wanted["compared"], f"rank {rank} differs"
        assert [incident["outcome"] for incident in result["incidents"]] == ["recovered"]


def test_one_update_for_each_call(uninterrupted: Any) -> None:
    updates = {manner: results[0]["compared"]["updates"] for manner, results in uninterrupted.items()}
    assert updates == {"apart": 6, "together": 3, "accumulated": 3}


def test_without_a_choice_it_is_refused() -> None:
    for result in fit(manner="bare", manual_optimization="refuse"):
        assert result.exit_code == 1
        assert 'pass manual_optimization="update" and put each update into' in result.error


def test_a_step_outside_of_an_update_is_refused() -> None:
    for result in fit(manner="bare"):
        assert result.exit_code == 1
        assert "every optimizer.step() must be called inside self.trainer.strategy.run_update(function)" in result.error


def test_as_it_is_it_trains_like_with_updates(uninterrupted: Any) -> None:
    for result, wanted in zip(values(fit(manner="bare", manual_optimization="fail_stop")), uninterrupted["apart"], strict=True):
        assert result["compared"] == wanted["compared"]


def test_as_it_is_an_exception_ends_the_run_on_all_ranks() -> None:
    fault = Fault(point=FaultPoint.BACKWARD, update=2, rank=3, kind=FaultKind.EXCEPTION)
    results = fit(manner="bare", manual_optimization="fail_stop", faults=[fault])
    assert [result.exit_code for result in results] == [FAIL_STOP_EXIT_CODE] * 4
    assert all("fail-stop" in result.output for result in results)
    assert any('with manual_optimization="fail_stop"' in result.output for result in results)


@pytest.mark.parametrize("kind", [FaultKind.SOCKETS, FaultKind.COLLECTIVE], ids=lambda kind: kind.value)
def test_as_it_is_a_failed_collective_runs_again(kind: FaultKind, uninterrupted: Any) -> None:
    """It needs no window."""
    fault = Fault(point=FaultPoint.BACKWARD, update=2, rank=3, kind=kind)
    results = values(fit(manner="bare", manual_optimization="fail_stop", faults=[fault]))
    for result, wanted in zip(results, uninterrupted["apart"], strict=True):
        assert result["compared"] == wanted["compared"]
        assert [incident["action"] for incident in result["incidents"]] == ["retry"]

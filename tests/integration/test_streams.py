"""Retries where collectives go on after their call, on the asynchronous double of Gloo: bit-exact on all ranks.

A fault of the links between replicas loses no work wherever it strikes; one that also hits the sharding group, whose
results a pass consumes at once, may cost the update.
"""

from __future__ import annotations

from typing import Any

import pytest
import streamed
from cluster import run_ranks, values
from integration.test_fault_matrix import PLACES, VICTIMS, assert_nothing_ran_again, assert_recovered, incidents

from lightning_accelpact.recovery.action import Action
from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint


def check(faults: list[Fault], reference: Any, **options: Any) -> list[dict[str, Any]]:
    """Run on the double and compare with the uninterrupted run on Gloo itself; returns all incident records."""
    results = values(run_ranks(streamed.fit_with, 4, {"faults": faults, **options}, reuse=True))
    for result, wanted in zip(results, reference(**options), strict=True):
        assert {key: result[key] for key in ("digest", "updates", "logged")} == {
            key: wanted[key] for key in ("digest", "updates", "logged")
        }
    return incidents(results)


def test_without_a_fault_the_double_changes_nothing(reference: Any) -> None:
    assert check([], reference) == []


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_between_replicas_loses_nothing(place: str, victim: int, reference: Any) -> None:
    fault = Fault(kind=FaultKind.SOCKETS, rank=victim, **{**PLACES[place], "group": "replicate"})
    found = check([fault], reference)
    assert_nothing_ran_again(found)
    assert_recovered(found)


@pytest.mark.parametrize("kind", FaultKind, ids=lambda kind: kind.value)
@pytest.mark.parametrize("place", PLACES)
def test_a_fault_of_all_links_changes_nothing(place: str, kind: FaultKind, reference: Any) -> None:
    assert_recovered(check([Fault(kind=kind, rank=3, **PLACES[place])], reference))


@pytest.mark.parametrize("victim", VICTIMS)
def test_an_all_reduce_that_fails_when_it_is_called_runs_again(victim: int, reference: Any) -> None:
    found = check([Fault(kind=FaultKind.COLLECTIVE, rank=victim, **PLACES["last-all-reduce"])], reference)
    assert_nothing_ran_again(found)


def test_several_all_reduces_are_served_by_whom_has_their_results(reference: Any) -> None:
    """The link fails in the middle of a backward pass: its later all-reduces fail, and some earlier ones on one side."""
    fault = Fault(point=FaultPoint.BACKWARD, update=2, rank=2, kind=FaultKind.SOCKETS, group="replicate")
    found = check([fault], reference)
    assert {incident["action"] for incident in found} == {Action.RETRY.value}


def test_two_faults_between_replicas_in_one_update(reference: Any) -> None:
    faults = [
        Fault(point=FaultPoint.BACKWARD, update=2, rank=3, kind=FaultKind.SOCKETS, group="replicate"),
        Fault(point=FaultPoint.VALIDATE, update=2, rank=0, kind=FaultKind.EXCEPTION),
    ]
    found = check(faults, reference)
    assert_nothing_ran_again(found)
    assert max(incident["attempts"] for incident in found) > 1


@pytest.mark.parametrize("accumulate", [1, 4])
def test_other_accumulation(accumulate: int, reference: Any) -> None:
    fault = Fault(point=FaultPoint.BACKWARD, update=2, rank=3, kind=FaultKind.SOCKETS, group="replicate")
    assert_nothing_ran_again(check([fault], reference, accumulate=accumulate))

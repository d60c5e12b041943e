"""A stranger at work on the control store of a run with faults: it goes on bit-exact, or it fail-stops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jobs
import pytest
import stranger
from cluster import free_port, run_ranks, values

from lightning_accelpact.recovery.fault import Fault, FaultPoint
from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE

SECRET = "the secret of this run alone"
OPTIONS: dict[str, Any] = {"updates": 6}
FAULTS = [
    Fault(rank=1, update=1, point=FaultPoint.BACKWARD),
    Fault(rank=2, update=3, point=FaultPoint.VOTE),
]


def against(work: Callable[..., object], **options: Any) -> tuple[list[Any], int]:
    """The run with faults and a stranger, and how often he has been at work."""
    environment = {"MASTER_PORT": str(free_port()), "ACCELPACT_SECRET": SECRET}
    with stranger.Stranger(int(environment["MASTER_PORT"]), work) as guest:
        results = run_ranks(jobs.fit_with, 4, {"faults": FAULTS, **OPTIONS, **options}, env=environment)
    return results, guest.rounds


@pytest.mark.parametrize(
    "work",
    [stranger.forge, partial(stranger.forge, secret=b"run id "), stranger.replay],
    ids=["with a wrong secret", "with the secret of runs that have none", "with what the ranks have said before"],
)
def test_a_stranger_changes_nothing(work: Callable[..., object], reference: Any) -> None:
    results, rounds = against(work)
    assert rounds > 3
    for result, wanted in zip(values(results), reference(**OPTIONS), strict=True):
        assert result["digest"] == wanted["digest"]
        assert result["logged"] == wanted["logged"]
        assert len(result["incidents"]) == len(FAULTS)


def test_a_stranger_who_deletes_everything_may_end_the_run_but_not_change_it(reference: Any) -> None:
    results, rounds = against(stranger.delete, collective_timeout=12.0, repair_budget=20.0)
    assert rounds > 3
    for result, wanted in zip(results, reference(**OPTIONS), strict=True):
        assert result.exit_code == FAIL_STOP_EXIT_CODE or result.value["digest"] == wanted["digest"], result.output
    assert len({result.exit_code for result in results}) == 1


def test_without_the_secret_nobody_takes_part() -> None:
    results = run_ranks(jobs.fit_with, 2, OPTIONS, env={"ACCELPACT_SECRET": "short"})
    for result in results:
        assert "the secret in ACCELPACT_SECRET has 5 characters" in result.error

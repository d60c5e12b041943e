"""A bit flips in one replica: it is found, named and acted on; what recovery does raises no alarm."""

from __future__ import annotations

from typing import Any

import jobs_replica
import pytest
from cluster import run_ranks, values

from lightning_accelpact.recovery.fault import Fault, FaultPoint
from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE

NAME = "blocks.1.linear.weight"
OPTIONS: dict[str, Any] = {"updates": 6, "digest_every": 2, "on_divergence": "warn"}


def test_two_replicas_stop_and_both_are_named() -> None:
    options = {**OPTIONS, "on_divergence": "stop"}
    for result in run_ranks(jobs_replica.fit, 4, 3, 3, NAME, "", options):
        assert result.exit_code == FAIL_STOP_EXIT_CODE, result.output
        # At 3 it has diverged, at 4 it is found; the next update has spoilt nothing else
        assert "after update 4 replicas hold different bits" in result.error
        assert f"bits: parameter {NAME} differs between ranks 1 and 3, and no majority" in result.error
        assert "They last agreed after update 2" in result.error


@pytest.mark.parametrize(
    ("key", "first"), [("", f"parameter/{NAME}"), ("exp_avg", f"state/0/{NAME}/exp_avg")], ids=["parameter", "state"]
)
def test_of_three_replicas_the_guilty_one_is_named(key: str, first: str) -> None:
    options = {**OPTIONS, "updates": 4, "replicate": 3, "shard": 1}
    for result in values(run_ranks(jobs_replica.fit, 3, 1, 1, NAME, key, options)):
        assert [2, first, [1], True] in [list(one) for one in result["divergences"]]
        assert {tuple(one[2]) for one in result["divergences"]} == {(1,)}
        assert all(NAME in one[1] for one in result["divergences"])
        assert result["updates"] == 4


def test_faults_and_repairs_raise_no_alarm(reference: Any) -> None:
    faults = [
        Fault(rank=1, update=1, point=FaultPoint.BACKWARD),
        Fault(rank=2, update=2, point=FaultPoint.BOUNDARY),
        Fault(rank=0, update=3, point=FaultPoint.STEP),
    ]
    options = {**OPTIONS, "digest_every": 1, "on_divergence": "stop", "faults": faults}
    results = values(run_ranks(jobs_replica.fit, 4, -1, 0, NAME, "", options))
    for result, wanted in zip(results, reference(updates=6), strict=True):
        assert result["divergences"] == []
        assert result["digest"] == wanted["digest"]
        assert len(result["incidents"]) == len(faults)


def test_a_single_replica_has_nothing_to_compare_with() -> None:
    for result in run_ranks(jobs_replica.fit, 2, -1, 0, NAME, "", {**OPTIONS, "replicate": 1, "shard": 2}):
        assert "digest_every=2 lets replicas compare their shards, but replicate=1 has no second one" in result.error

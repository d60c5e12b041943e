"""What a step changes besides gradients: set back before it runs again, or, where that cannot be, the run stops."""

from __future__ import annotations

import jobs_side_effects
import pytest
from cluster import run_ranks, values
from jobs_side_effects import Averaged, Follower, FollowerOfAll, OwnNoiseAndRate, Replacing, Scaling, Taught

from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE
from lightning_accelpact.recovery.window import WEIGHTS_WRITTEN

IN_BACKWARD = ["backward@2:1:exception"]


def digests(module: type, faults: list[str], uncommitted: str) -> list[str]:
    results = values(run_ranks(jobs_side_effects.fit, 2, module, faults, uncommitted))
    assert all(bool(result["verbs"]) == bool(faults) for result in results)
    return [result["digest"] for result in results]


@pytest.mark.parametrize("module", [OwnNoiseAndRate, Averaged, Taught])
def test_what_is_the_users_own_is_set_back(module: type) -> None:
    assert digests(module, IN_BACKWARD, "redo") == digests(module, [], "redo")


@pytest.mark.parametrize("module", [Follower, FollowerOfAll, Replacing])
def test_weights_written_to_inside_an_update_stop_the_run_rather_than_twice(module: type) -> None:
    for result in run_ranks(jobs_side_effects.fit, 2, module, IN_BACKWARD, "redo"):
        assert result.exit_code == FAIL_STOP_EXIT_CODE, f"{result.output}\n{result.error}"
        assert WEIGHTS_WRITTEN in result.error.splitlines()[-1]


def test_a_batch_written_to_behind_torchs_back_stops_the_run_rather_than_twice() -> None:
    for result in run_ranks(jobs_side_effects.fit, 2, Scaling, IN_BACKWARD, "redo"):
        assert result.exit_code == FAIL_STOP_EXIT_CODE, f"{result.output}\n{result.error}"
        assert "wrote to a tensor of its batch" in result.error.splitlines()[-1]


def test_they_are_no_obstacle_where_a_collective_runs_again() -> None:
    assert digests(Follower, ["backward@2:1"], "retry") == digests(Follower, [], "retry")

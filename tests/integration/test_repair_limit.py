"""How many repairs are allowed: in each update, and in each operation between two."""

from __future__ import annotations

import jobs_evaluation
from cluster import run_ranks, values

from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE


def test_a_long_validation_may_have_as_many_faults_as_it_has_steps() -> None:
    expected = values(run_ranks(jobs_evaluation.validate, 2, {}, 2))
    results = values(run_ranks(jobs_evaluation.validate, 2, dict.fromkeys(range(6), 1), 2))
    assert [result.pop("incidents") for result in results] == [6, 6]
    assert results == [{key: one[key] for key in one if key != "incidents"} for one in expected]


def test_one_step_may_not() -> None:
    for result in run_ranks(jobs_evaluation.validate, 2, {3: 9}, 2):
        assert result.exit_code == FAIL_STOP_EXIT_CODE, f"{result.output}\n{result.error}"
        assert "max_repairs_per_update=2 is used up" in result.error.splitlines()[-1]

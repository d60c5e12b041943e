"""Ranks whose programs have parted would wait for each other in every repair anew: the first one ends that."""

from __future__ import annotations

import jobs_parted
from cluster import run_ranks

from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE


def test_a_rank_that_stops_early_ends_the_run_after_one_timeout() -> None:
    for result in run_ranks(jobs_parted.fit, 2):
        assert result.exit_code == FAIL_STOP_EXIT_CODE, f"{result.output}\n{result.error}"
        assert "ranks [1] wait for all ranks before update 2" in result.error.splitlines()[-1]
        assert "ranks [0] are inside it: their programs have parted" in result.error.splitlines()[-1]

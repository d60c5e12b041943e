"""Several runs with one module in one process."""

from __future__ import annotations

import jobs_stages
from cluster import run_ranks, values


def test_one_module_can_be_trained_tested_used_and_trained_again() -> None:
    for result in values(run_ranks(jobs_stages.stages, 2)):
        assert result["predictions"] == 2
        assert result["steps"] == 4
        assert "dataloader_idx" in result["arguments"]

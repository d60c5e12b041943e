"""Every rank's replay begins in the same iteration of the loop, and its gradients come from the right batches."""

from __future__ import annotations

import pytest
from accelerate_loops import run_ranks

UPDATES, EVERY = 4, 3


@pytest.mark.parametrize("seed", range(150))
def test_ranks_stay_together_whatever_they_lag_behind(seed: int) -> None:
    traces = run_ranks(seed, updates=UPDATES, every=EVERY, faults=1 + seed % 3)
    for trace in traces:
        assert trace.error is None
        assert trace.updates == [list(range(EVERY * update, EVERY * (update + 1))) for update in range(UPDATES)]
        assert trace.commits == traces[0].commits
        assert trace.iterations == traces[0].iterations


def test_without_a_fault_no_iteration_is_idle() -> None:
    traces = run_ranks(0, updates=UPDATES, every=EVERY, faults=0)
    assert [trace.iterations for trace in traces] == [UPDATES * EVERY] * len(traces)

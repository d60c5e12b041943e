"""Expected completion times against FailBench's own crossovers and against Daly's limits."""

from __future__ import annotations

import math

import pytest

from lightning_accelpact.goodput.completion import completion_time, crossover, daly_completion_time

# FailBench, A2 with 205 MB of state: steady-state overhead, restore time; both lose the same work (Table VII, section IX)
FT1 = {"overhead": 0.0048, "recovery_s": 0.155, "lost_work_s": 5.6}
FT2 = {"overhead": 0.0378, "recovery_s": 0.017, "lost_work_s": 5.6}


def failbench_crossover(gap_s: float) -> float | None:
    return crossover(overhead=0.0048, failure_s=gap_s, other_overhead=0.0378, other_failure_s=0)


def test_failbenchs_crossovers() -> None:
    """FT2 finishes first below M of about 4.2 s, or 9.7 s with cold-cache restores."""
    assert failbench_crossover(0.155 - 0.017) == pytest.approx(4.2, abs=0.05)
    # The cold-cache restores themselves are not printed: 9.7 s means they differ by 320 ms
    assert failbench_crossover(0.320) == pytest.approx(9.7, abs=0.05)


@pytest.mark.parametrize(("between_s", "first"), [(3.9, FT2), (4.5, FT1), (86_400.0, FT1)])
def test_completion_times_cross_there(between_s: float, first: dict[str, float]) -> None:
    times = [completion_time(work_s=1000, between_failures_s=between_s, **one) for one in (FT1, FT2)]
    assert [FT1, FT2][times.index(min(times))] is first


def test_a_completion_time_by_hand() -> None:
    # 100 s of 5 %, and ten failures of 2 + 3 s
    assert completion_time(
        work_s=100, overhead=0.05, recovery_s=2, lost_work_s=3, between_failures_s=10
    ) == pytest.approx(155)


def test_what_is_better_in_both_respects_has_no_crossover() -> None:
    assert crossover(overhead=0.01, failure_s=1, other_overhead=0.02, other_failure_s=2) is None
    assert crossover(overhead=0.01, failure_s=2, other_overhead=0.01, other_failure_s=1) is None


def test_rare_failures_leave_checkpoints_alone() -> None:
    time = daly_completion_time(work_s=1000, interval_s=100, checkpoint_s=10, restart_s=60, between_failures_s=1e9)
    assert time == pytest.approx(1100, rel=1e-4)


def test_first_order_and_complete_model_agree_for_rare_failures() -> None:
    arguments = {"work_s": 1e6, "between_failures_s": 1e6}
    complete = daly_completion_time(interval_s=1000, checkpoint_s=5, restart_s=60, **arguments)
    first_order = completion_time(overhead=0.005, recovery_s=60, lost_work_s=1005 / 2, **arguments)
    assert complete == pytest.approx(first_order, rel=1e-5)


@pytest.mark.parametrize("name", ["interval_s", "between_failures_s"])
def test_a_zero_that_never_ends_is_refused(name: str) -> None:
    arguments = dict(work_s=1, interval_s=1, checkpoint_s=1, restart_s=1, between_failures_s=1)
    with pytest.raises(ValueError, match=f"^{name} must be more than 0, got 0"):
        daly_completion_time(**{**arguments, name: 0})


def test_an_overhead_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="^overhead must be a finite share"):
        completion_time(work_s=1, overhead=math.nan, recovery_s=1, lost_work_s=1, between_failures_s=1)

"""Checkpoint intervals against values worked by hand and against brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_accelpact.goodput.completion import daly_completion_time
from lightning_accelpact.goodput.intervals import best_interval, daly_interval, young_interval

HOUR = 3600.0


def test_young() -> None:
    assert young_interval(checkpoint_s=50, between_failures_s=10_000) == 1000


def test_daly() -> None:
    # delta / 2M = 0.0025, its root 0.05: 1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50
    assert daly_interval(checkpoint_s=50, between_failures_s=10_000) == pytest.approx(966.944, abs=1e-3)


def test_daly_where_checkpoints_are_longer_than_the_time_between_failures() -> None:
    assert daly_interval(checkpoint_s=200, between_failures_s=100) == 100


@given(checkpoint_s=st.floats(0.1, 600), hours=st.floats(0.05, 1000))
def test_nothing_beats_the_best(checkpoint_s: float, hours: float) -> None:
    def time(interval_s: float) -> float:
        return daly_completion_time(
            work_s=1, interval_s=interval_s, checkpoint_s=checkpoint_s, restart_s=60, between_failures_s=hours * HOUR
        )

    best = best_interval(checkpoint_s=checkpoint_s, between_failures_s=hours * HOUR)
    assert all(time(best) <= time(best * factor) * (1 + 1e-12) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


@given(checkpoint_s=st.floats(0.1, 60), hours=st.floats(1, 1000))
def test_the_approximations_are_close_where_checkpoints_are_short(checkpoint_s: float, hours: float) -> None:
    arguments = {"checkpoint_s": checkpoint_s, "between_failures_s": hours * HOUR}
    best, ratio = best_interval(**arguments), math.sqrt(checkpoint_s / (hours * HOUR))
    assert daly_interval(**arguments) == pytest.approx(best, rel=0.01)
    assert young_interval(**arguments) == pytest.approx(best, rel=ratio + 0.01)


def test_without_failures_between() -> None:
    assert best_interval(checkpoint_s=1, between_failures_s=0) == 0


@pytest.mark.parametrize("function", [young_interval, daly_interval, best_interval])
@pytest.mark.parametrize("name", ["checkpoint_s", "between_failures_s"])
def test_impossible_values_are_refused(function: object, name: str) -> None:
    arguments = {"checkpoint_s": 1.0, "between_failures_s": 1.0, name: math.nan}
    with pytest.raises(ValueError, match=f"^{name} must be finite and at least 0, got nan"):
        function(**arguments)

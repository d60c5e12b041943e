"""Estimates against numbers known from elsewhere, and what many records of a cell come to."""

from __future__ import annotations

import math

import pytest
from failbench_records import continued, halted, like, made

from benchmarks.failbench.aggregation import Spread, estimate, loss_progress, stalled_share, summarize, t_quantile
from benchmarks.failbench.cell import Cell
from benchmarks.failbench.record import Evidence, Outcome


def density(t: float, degrees: int) -> float:
    """Student's t."""
    log = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - math.log(degrees * math.pi) / 2
    return math.exp(log - (degrees + 1) / 2 * math.log1p(t * t / degrees))


def share_between(low: float, high: float, degrees: int, steps: int = 2000) -> float:
    """Simpson's rule."""
    width = (high - low) / steps
    weights = [1, *(4 if step % 2 else 2 for step in range(1, steps)), 1]
    return sum(weight * density(low + step * width, degrees) for step, weight in enumerate(weights)) * width / 3


@pytest.mark.parametrize("degrees", [*range(1, 31), 31, 40, 100, 1000])
def test_the_quantiles_leave_5_percent_outside(degrees: int) -> None:
    quantile = t_quantile(degrees)
    assert share_between(-quantile, quantile, degrees) == pytest.approx(0.95, abs=1e-4)


@pytest.mark.parametrize(("samples", "mean", "half", "spread"), [
    ([2.0], 2.0, 0.0, Spread.NONE),
    ([1.0, 2.0], 1.5, 0.5, Spread.HALF_RANGE),
    ([1.0, 2.0, 5.0], 8 / 3, 2.0, Spread.HALF_RANGE),
    # 3.182 * sqrt(5/3) / 2
    ([1.0, 2.0, 3.0, 4.0], 2.5, 2.0540, Spread.T_INTERVAL),
])  # fmt: skip
def test_estimates(samples: list[float], mean: float, half: float, spread: Spread) -> None:
    found = estimate(samples)
    assert (found.n, found.mean, found.half, found.spread) == (
        len(samples),
        pytest.approx(mean),
        pytest.approx(half, rel=1e-3),
        spread,
    )


def test_no_samples_are_no_estimate() -> None:
    assert estimate([]) is None
    with pytest.raises(ValueError, match="degrees=0"):
        t_quantile(0)


def test_the_overhead_is_against_the_same_architecture_without_a_mechanism() -> None:
    plain = [made("A2/FT9/none"), halted("A2"), made("A3/FT9/none", step_seconds_before=(9.0,))]
    found = summarize([*plain, made("A2/FT1/F1", step_seconds_before=(0.1, 0.14))])
    assert found[Cell.parse("A2/FT1/F1")].mean("overhead") == pytest.approx(0.2)
    assert found[Cell.parse("A2/FT9/F1")].mean("overhead") == pytest.approx(0.0)


def test_without_anything_to_compare_with_there_is_no_overhead() -> None:
    (found,) = summarize([made("A2/FT1/F1")]).values()
    assert found.mean("overhead") is None


def test_lists_count_recoveries_and_the_rest_runs() -> None:
    (found,) = summarize([like("FT1", seed=seed, detect_seconds=(0.1, 0.2)) for seed in range(3)]).values()
    assert (found.runs, found.outcome, found.evidence) == (3, Outcome.RECOVERED, Evidence.MEASURED)
    assert found.estimates["detect"].n == 6
    assert found.estimates["lost_steps"].n == 3
    assert found.mean("stalled_share") == pytest.approx(0.0005 / 0.1)
    assert found.mean("skew") == pytest.approx(0.005)


def test_a_run_again_replaces_the_first() -> None:
    (found,) = summarize([made("A2/FT1/F1", outcome=Outcome.FAILED, reason="no luck"), made("A2/FT1/F1")]).values()
    assert (dict(found.outcomes), found.reasons) == ({Outcome.RECOVERED: 1}, ())


def test_the_weakest_evidence_counts() -> None:
    (found,) = summarize([made("A2/FT1/F1"), made("A2/FT1/F1", seed=1, evidence=Evidence.ANALYTIC)]).values()
    assert found.evidence is Evidence.ANALYTIC


def test_presets_are_not_mixed() -> None:
    with pytest.raises(ValueError, match="presets cpu, tiny"):
        summarize([made("A2/FT1/F1"), made("A2/FT1/F1", preset="cpu")])


@pytest.mark.parametrize(("digest", "exact"), [("0" * 64, 1.0), ("f" * 64, 0.0), (None, None)])
def test_weights_are_compared_with_the_run_without_a_fault(digest: str | None, exact: float | None) -> None:
    found = summarize(
        [made("A2/FT9/none"), made("A2/FT9/none", seed=1, weights_sha256="e"), like("FT1", weights_sha256=digest)]
    )
    assert found[Cell.parse("A2/FT1/F1")].mean("exact") == exact


@pytest.mark.parametrize(("after", "ours", "theirs"), [(0.1, 18, 18), (0.05, 18, 9), (0.2, 9, 18)])
def test_progress_is_compared_over_the_same_time(after: float, ours: int, theirs: int) -> None:
    """If steps take half as long after the fault, there are twice as many in the same time; both have 18 left."""
    falling = tuple(10.0 - step for step in range(30))
    run = continued("A6", losses=falling, step_seconds_after=(after,) * 18)
    # The other run's own pace is of no account
    found = loss_progress(run, made("A6/FT9/none", losses=falling, step_seconds_before=(7.0,)))
    assert found == (pytest.approx(ours), pytest.approx(theirs))


def test_a_mechanism_without_saves_in_advance_never_stands_still() -> None:
    assert stalled_share(like("FT4")) == 0.0
    assert stalled_share(like("FT5")) == pytest.approx(0.372 / (0.4723 - 0.372), rel=1e-3)


def test_no_progress_without_an_end() -> None:
    assert loss_progress(halted("A2"), made("A2/FT9/none")) is None
    assert loss_progress(made("A2/FT9/none"), made("A2/FT9/none")) is None

"""The closed form and the simulation, against each other where both hold and against hand-made cases."""

from __future__ import annotations

import time

import pytest

from lightning_accelpact.goodput.completion import daly_completion_time
from lightning_accelpact.goodput.failures import DAY_S, FailureClass
from lightning_accelpact.goodput.method import Handling, Method, outlook
from lightning_accelpact.goodput.methods import methods
from lightning_accelpact.goodput.plan_inputs import PlanInputs
from lightning_accelpact.goodput.presets import LLAMA_3, LLAMA_3_405B
from lightning_accelpact.goodput.simulation import Arrivals, enough_days, simulate

INPUTS = PlanInputs(
    gpus=LLAMA_3_405B.gpus, update_s=LLAMA_3_405B.update_s, state_gb=LLAMA_3_405B.state_gb, checkpoint_gb_s=200.0,
    failures=LLAMA_3, replica_gpus=128,
)  # fmt: skip
PER_DAY = LLAMA_3.per_day(INPUTS.gpus)
PARTS = ("overhead", "checkpoints", "wasted", "down")


def restarting(seconds: float, **options: float) -> Method:
    handling = dict.fromkeys(FailureClass, Handling(restart_s=seconds))
    return Method(**{"name": "restarts", "note": "", "checkpoint_s": 30.0, "handling": handling, **options})


def test_without_memory_the_closed_form_is_dalys() -> None:
    found = outlook(restarting(400.0), failures_per_day=8, shares=LLAMA_3.shares)
    time_s = daly_completion_time(
        work_s=1, interval_s=found.interval_s, checkpoint_s=30, restart_s=400, between_failures_s=DAY_S / 8
    )
    assert found.goodput == pytest.approx(1 / time_s)


@pytest.mark.parametrize("index", range(7))
def test_shares_add_up(index: int) -> None:
    found = outlook(methods(INPUTS)[index], failures_per_day=PER_DAY, shares=LLAMA_3.shares)
    assert found.goodput + sum(getattr(found, part) for part in PARTS) == pytest.approx(1)
    assert found.lost_s_per_day == pytest.approx(DAY_S * (1 - found.goodput))


@pytest.mark.parametrize("method", methods(INPUTS), ids=lambda method: method.name)
def test_simulation_and_closed_form_agree(method: Method) -> None:
    """Poisson failures of a 16,384-GPU cluster: the time lost, not just the goodput, within 2 %."""
    exact = outlook(method, failures_per_day=PER_DAY, shares=LLAMA_3.shares)
    drawn = simulate(method, failures_per_day=PER_DAY, shares=LLAMA_3.shares, days=50_000, seed=3)
    assert drawn.outlook.lost_s_per_day == pytest.approx(exact.lost_s_per_day, rel=0.02)
    assert drawn.outlook.goodput + sum(getattr(drawn.outlook, part) for part in PARTS) == pytest.approx(1)
    assert drawn.failures == pytest.approx(50_000 * PER_DAY, rel=0.01)
    share = method.restart_share(LLAMA_3.shares)
    assert drawn.restarts >= drawn.failures * share * 0.98
    for part in PARTS:
        assert getattr(drawn.outlook, part) == pytest.approx(getattr(exact, part), rel=0.05, abs=1e-4)


def test_they_agree_away_from_the_best_interval() -> None:
    method = restarting(400.0, overhead=0.01)
    arguments = {"failures_per_day": 20.0, "shares": LLAMA_3.shares, "interval_s": 4000.0}
    drawn = simulate(method, days=20_000, seed=1, **arguments).outlook
    assert drawn.lost_s_per_day == pytest.approx(outlook(method, **arguments).lost_s_per_day, rel=0.02)


def test_a_seed_gives_the_same_result() -> None:
    def drawn(seed: int) -> float:
        arguments = {"failures_per_day": 8.0, "shares": LLAMA_3.shares, "days": 200.0}
        return simulate(restarting(400.0), seed=seed, **arguments).outlook.goodput

    assert drawn(1) == drawn(1) != drawn(2)


def test_bursts_leave_long_quiet_times() -> None:
    """As many failures, of which many strike when little can be lost, or during a restart."""
    arguments = {"failures_per_day": PER_DAY, "shares": LLAMA_3.shares, "days": 20_000, "seed": 5}
    lost, failures = zip(*(
        (found.outlook.lost_s_per_day, found.failures)
        for found in (simulate(restarting(400.0), **arguments, arrivals=Arrivals(variation=variation))
                      for variation in (0.5, 1.0, 1.48, 3.0))
    ), strict=True)  # fmt: skip
    assert list(lost) == sorted(lost, reverse=True)
    assert failures == pytest.approx([20_000 * PER_DAY] * 4, rel=0.03)


def test_consequences_keep_the_rate() -> None:
    arguments = {"failures_per_day": PER_DAY, "shares": LLAMA_3.shares, "days": 20_000, "seed": 5}
    cascading = simulate(restarting(400.0), **arguments, arrivals=Arrivals(cascade_share=0.3, cascade_s=60))
    assert cascading.failures == pytest.approx(20_000 * PER_DAY, rel=0.02)
    assert cascading.outlook.lost_s_per_day < simulate(restarting(400.0), **arguments).outlook.lost_s_per_day


def test_a_lost_domain_restarts_what_heals_single_nodes() -> None:
    heal = methods(INPUTS)[-1]
    arguments = {"failures_per_day": PER_DAY, "shares": LLAMA_3.shares, "days": 5000, "seed": 5}
    few, many = (simulate(heal, **arguments, arrivals=Arrivals(domain_share=share)) for share in (0.0, 0.5))
    job, node = LLAMA_3.shares[FailureClass.JOB], LLAMA_3.shares[FailureClass.NODE]
    assert few.restarts / few.failures == pytest.approx(job, rel=0.05)
    assert many.restarts / many.failures == pytest.approx(job + node / 2, rel=0.05)
    assert many.outlook.goodput < few.outlook.goodput


def test_without_restarts_there_are_no_checkpoints() -> None:
    handling = dict.fromkeys(FailureClass, Handling(in_memory=1.0, repair_s=10.0, repeated_s=5.0))
    method = Method(name="memory", note="", checkpoint_s=30.0, handling=handling)
    arguments = {"failures_per_day": 10.0, "shares": LLAMA_3.shares}
    exact, drawn = outlook(method, **arguments), simulate(method, days=20_000, seed=1, **arguments)
    assert exact.goodput == pytest.approx(DAY_S / (DAY_S + 150))
    assert (exact.checkpoints, drawn.outlook.checkpoints, drawn.restarts) == (0, 0, 0)
    assert drawn.outlook.lost_s_per_day == pytest.approx(exact.lost_s_per_day, rel=0.02)


def test_failures_without_end_leave_nothing() -> None:
    found = outlook(restarting(400.0), failures_per_day=1e6, shares=LLAMA_3.shares, interval_s=3600.0)
    assert 0 <= found.goodput < 1e-9


def test_a_hundred_thousand_days() -> None:
    """The promise is 60 s; it takes a fraction of a second, so this cannot fail on a busy machine."""
    began = time.process_time()
    simulate(methods(INPUTS)[0], failures_per_day=PER_DAY, shares=LLAMA_3.shares, days=100_000, seed=1)
    assert time.process_time() - began < 60


@pytest.mark.parametrize(("per_day", "days"), [(1.0, 100_000), (500.0, 2000)])
def test_as_many_days_as_a_million_failures_take(per_day: float, days: float) -> None:
    assert enough_days(per_day) == days


@pytest.mark.parametrize("per_day", [500.0, 20_000.0])
def test_failures_that_come_faster_than_updates_take_no_more_than_there_is(per_day: float) -> None:
    """Shares are of the time that has passed: none is below 0."""
    for method in methods(INPUTS):
        drawn = simulate(method, failures_per_day=per_day, shares=LLAMA_3.shares, days=20, seed=1).outlook
        assert min(drawn.goodput, drawn.wasted, drawn.down, drawn.checkpoints) >= 0
        assert drawn.goodput <= outlook(method, failures_per_day=per_day, shares=LLAMA_3.shares).goodput + 0.01


@pytest.mark.parametrize(
    ("change", "message"),
    [({"variation": 0.0}, "variation must be"), ({"cascade_share": 1.0}, "cascade_share must be from 0 to below 1"),
     ({"cascade_s": -1.0}, "cascade_s must be"), ({"domain_share": 1.1}, "domain_share must be from 0 to 1, got 1.1")],
)  # fmt: skip
def test_impossible_arrivals_are_refused(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Arrivals(**change)


@pytest.mark.parametrize("name", ["days", "failures_per_day"])
def test_a_simulation_needs_time_and_failures(name: str) -> None:
    arguments = {"failures_per_day": 1.0, "days": 1.0, name: 0.0}
    with pytest.raises(ValueError, match=f"{name} must be finite and more than 0, got 0.0"):
        simulate(restarting(1.0), shares=LLAMA_3.shares, seed=0, **arguments)

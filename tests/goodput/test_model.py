"""The economic model against the paper's own arithmetic, and against single-step cases worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lightning_accelpact.goodput.model import (
    Recovery,
    guard_cost,
    rejection_cost,
    saved_against_restart,
    saved_per_recovery,
    time_saved,
    time_saved_by_actions,
)
from lightning_accelpact.goodput.presets import LLAMA_3, LLAMA_3_405B, PAPER_GUARD, PAPER_REPAIR_S
from lightning_accelpact.goodput.ranges import over

DAY_S = 86_400
# The paper's example: 16 GPUs, checkpoint age 5, updates of 220 s, a guard of 0.2 %, one day
PAPER = dict(
    checkpoint_age=5, update_s=220, repair_s=0.77, detect_s=0, reject_s=0, guard_overhead=0.002, baseline_s=DAY_S
)
INTERRUPTIONS_A_DAY = 7.76


def rounded(value: float, expected: float, *, unit: float) -> bool:
    """Whether ``expected`` is ``value`` to the last digit printed, be it rounded or cut off."""
    return abs(value - expected) < unit


def test_the_guard_costs_172_8_seconds_a_day() -> None:
    assert guard_cost(guard_overhead=0.002, baseline_s=DAY_S) == pytest.approx(172.8)


def test_a_recovery_saves_1099_2_seconds() -> None:
    assert saved_per_recovery(checkpoint_age=5, update_s=220, repair_s=0.77) == pytest.approx(1099.23)


def test_one_recovery_pays_for_6_3_days_of_guard() -> None:
    # 6.36, which the paper cuts off
    days = saved_per_recovery(checkpoint_age=5, update_s=220, repair_s=0.77) / 172.8
    assert rounded(days, 6.3, unit=0.1)
    assert time_saved(eligible=1, other=0, **{**PAPER, "baseline_s": days * DAY_S}) == pytest.approx(0, abs=1e-9)


def test_two_percent_eligible_pays_for_98_6_percent_of_the_guard() -> None:
    gross = time_saved(eligible=0.155, other=INTERRUPTIONS_A_DAY - 0.155, **PAPER) + 172.8
    assert rounded(gross, 170.4, unit=0.05)
    assert rounded(gross / 172.8 * 100, 98.6, unit=0.05)


def test_ten_percent_eligible_nets_680_2_seconds_a_day() -> None:
    net = time_saved(eligible=0.776, other=INTERRUPTIONS_A_DAY - 0.776, **PAPER)
    # The paper's gross uses 1,099.2 instead of 1,099.23 and is cut off: 853.0 becomes 852.9
    assert rounded(net + 172.8, 852.9, unit=0.11)
    assert rounded(net, 680.2, unit=0.05)
    assert rounded(net / 172.8, 3.9, unit=0.05)


def test_rejections_are_taken_off() -> None:
    # The paper's figures leave this term out (C < 0.1 s); at its bound it is 0.7 s a day
    assert rejection_cost(detect_s=0.06, reject_s=0.04) == pytest.approx(0.1)
    free = time_saved(eligible=0.776, other=6.984, **PAPER)
    priced = time_saved(eligible=0.776, other=6.984, **{**PAPER, "detect_s": 0.06, "reject_s": 0.04})
    assert free - priced == pytest.approx(0.6984)


def test_a_guard_within_noise_may_be_negative() -> None:
    saved = time_saved(eligible=0, other=0, **{**PAPER, "guard_overhead": -0.00412})
    assert saved == pytest.approx(0.00412 * DAY_S)


def test_saving_turns_negative_when_the_checkpoint_is_fresh() -> None:
    assert saved_per_recovery(checkpoint_age=0, update_s=220, repair_s=0.77) == -0.77


# -- what the paper does not have

ACTIONS: dict[str, Any] = dict(
    **PAPER, preserved=2, redone=3, healed=1, other=4, restart_s=100, repeated_updates=0.5, heal_s=30
)


def test_without_redo_and_heal_the_extension_is_the_papers() -> None:
    none = {"redone": 0, "healed": 0, "restart_s": 0, "preserved": 0.776, "other": 6.984}
    assert time_saved_by_actions(**{**ACTIONS, **none}) == time_saved(eligible=0.776, other=6.984, **PAPER)


def test_every_action_by_hand() -> None:
    # A restart costs 5 * 220 + 100; half an update of 220 s is repeated by REDO and HEAL
    by_hand = 2 * (1200 - 0.77) + 3 * (1200 - 0.77 - 110) + 1 * (1200 - 30 - 110) - 4 * 0.1 - 172.8
    assert time_saved_by_actions(**{**ACTIONS, "detect_s": 0.06, "reject_s": 0.04}) == pytest.approx(by_hand)


def test_no_more_than_one_update_is_repeated() -> None:
    with pytest.raises(ValueError, match="repeated_updates must be from 0 to 1, got 1.5"):
        time_saved_by_actions(**{**ACTIONS, "repeated_updates": 1.5})


# -- the paper's scales, mixed and not


def a_day(**changes: Any) -> float:
    """The paper's net saving of a day if a tenth of all interruptions can be repaired."""
    arguments = {**PAPER, **changes}
    interruptions = arguments.pop("interruptions")
    return time_saved(eligible=interruptions / 10, other=interruptions * 9 / 10, **arguments)


def test_the_paper_mixes_an_update_of_16_gpus_with_failures_of_16_384() -> None:
    assert rounded(a_day(interruptions=INTERRUPTIONS_A_DAY), 680.2, unit=0.05)


def test_on_its_16_gpus_the_paper_s_guard_never_pays() -> None:
    """At the same rate per GPU there is a failure in 132 days: 0.8 s a day saved, 172.8 s spent."""
    net = a_day(interruptions=LLAMA_3.per_day(16))
    assert net + 172.8 == pytest.approx(0.83, abs=0.01)
    assert net == pytest.approx(-171.97, abs=0.01)


def test_on_16_384_gpus_an_update_is_shorter() -> None:
    """6.2 s instead of 220 s: five updates are 31 s, and 23 s a day are saved."""
    net = a_day(interruptions=LLAMA_3.per_day(16_384), update_s=LLAMA_3_405B.update_s)
    assert net + 172.8 == pytest.approx(23.5, abs=0.1)
    assert net < -149


def test_the_measured_guard_leaves_the_sign_open() -> None:
    net = over(a_day, interruptions=LLAMA_3.per_day(16), guard_overhead=PAPER_GUARD, repair_s=PAPER_REPAIR_S)
    assert net.low < 0 < net.high


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in ("eligible", "other", *PAPER) for value in (math.nan, math.inf, -1)
     if (name, value) != ("guard_overhead", -1)],
)  # fmt: skip
def test_impossible_arguments_are_refused_by_name(name: str, value: float) -> None:
    arguments: dict[str, Any] = {"eligible": 1, "other": 1, **PAPER, name: value}
    with pytest.raises(ValueError, match=rf"^{name} must be .*got {value!r}"):
        time_saved(**arguments)


def test_a_real_run_against_restarts() -> None:
    recoveries = [
        Recovery(checkpoint_age=5, detect_s=0.1, repair_s=0.4, redo_s=1.5),
        Recovery(checkpoint_age=0, detect_s=0.0, repair_s=0.5, redo_s=0.0),
    ]
    # (5 * 10 - 2) + (0 * 10 - 0.5) - 3
    assert saved_against_restart(recoveries, update_s=10, guard_s=3) == pytest.approx(44.5)
    assert saved_against_restart(recoveries, update_s=10, guard_s=3, restart_s=60) == pytest.approx(164.5)


def test_without_incidents_only_the_guard_counts() -> None:
    assert saved_against_restart([], update_s=10, restart_s=60, guard_s=3) == -3


@pytest.mark.parametrize("name", ["update_s", "restart_s", "guard_s"])
def test_a_real_run_refuses_impossible_inputs(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be finite and at least 0, got -1"):
        saved_against_restart([], **{"update_s": 1, name: -1})


@pytest.mark.parametrize("name", ["checkpoint_age", "detect_s", "repair_s", "redo_s"])
def test_a_recovery_refuses_impossible_values(name: str) -> None:
    values = {"checkpoint_age": 1, "detect_s": 1, "repair_s": 1, "redo_s": 1, name: math.nan}
    with pytest.raises(ValueError, match=f"^{name} must"):
        Recovery(**values)

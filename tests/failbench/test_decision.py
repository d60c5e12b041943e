"""Decisions on records with the paper's figures are the paper's; on others they follow the model."""

from __future__ import annotations

import io
import math
from typing import Any

import pytest
from failbench_records import PAPER_LIKE, continued, halted, like, made
from rich.console import Console

from benchmarks.failbench.decision import Candidate, Decision, Input, Question, Tag, decide
from benchmarks.failbench.decision_view import render

# Section VII: overheads of FT1 and FT2, restores, and an interval of 100 steps of 112 ms
STEP = 0.112
PAPER = [
    made("A2/FT9/none", step_seconds_before=(STEP,)),
    like("FT1", step_seconds_before=(1.0048 * STEP,), save_interval_steps=100),
    like("FT2", step_seconds_before=(1.0378 * STEP,), save_interval_steps=100),
    like("FT4", step_seconds_before=(STEP,), lost_seconds=0.0),
]


def question(**values: Any) -> Question:
    return Question(**{"architecture": "A2", "between_failures_s": 3600.0, "by_steps": True, **values})


def answer(**values: Any) -> Decision:
    return decide(PAPER, question(**values))


def candidate(decision: Decision, mechanism: str) -> Candidate:
    (one,) = [one for one in decision.candidates if one.mechanism == mechanism]
    return one


def test_the_papers_break_even() -> None:
    """FT2 minimizes completion time only below M = 4.2 s (section IX)."""
    decision = answer()
    assert decision.best.mechanism == "FT1"
    assert decision.break_evens["FT2"] == pytest.approx(4.2, abs=0.05)
    assert answer(between_failures_s=4.0).best.mechanism == "FT2"
    assert answer(between_failures_s=4.4).best.mechanism == "FT1"


def test_ft4_is_a_choice_only_if_the_warning_is_long_enough() -> None:
    assert answer(warning_s=2.0).best.mechanism == "FT4"
    (obstacle,) = candidate(answer(warning_s=0.5), "FT4").obstacles
    assert obstacle == "needs a warning of more than 0.885 s, and there are 0.5 s"
    assert candidate(answer(), "FT4").obstacles


def test_with_a_warning_ft4_wins_at_every_rate() -> None:
    """Section IX: at every M."""
    for seconds in (3.0, 60.0, 1e6):
        assert answer(warning_s=2.0, between_failures_s=seconds).best.mechanism == "FT4"


@pytest.mark.parametrize(("limits", "best"), [
    ({}, "FT1"),
    ({"restore_cap_s": 0.1}, "FT2"),
    ({"restore_cap_s": 0.1, "overhead_cap": 0.02}, None),
    ({"storage_bytes": 500}, "FT2"),
    ({"host_memory_bytes": 500}, "FT1"),
    ({"storage_bytes": 500, "host_memory_bytes": 500}, None),
])  # fmt: skip
def test_limits(limits: dict[str, float], best: str | None) -> None:
    decision = answer(**limits)
    assert (decision.best.mechanism if decision.best else None) == best


def test_completion_time_is_the_papers_formula() -> None:
    one = candidate(answer(work_s=1000.0, between_failures_s=100.0), "FT1")
    # T0 (1 + o) + T0 / M (detect + restore + re-form + respawn + half an interval of steps)
    assert one.completion_s == pytest.approx(1000 * 1.0048 + 10 * (0.02 + 0.155 + 2.0 + 0.5 + 50 * STEP))


def test_what_an_input_rests_on() -> None:
    tags = {name: one.tag for name, one in candidate(answer(), "FT1").inputs.items()}
    assert tags == {
        "overhead": Tag.MEASURED, "detect": Tag.MEASURED, "restore": Tag.MEASURED, "reform": Tag.MEASURED,
        "lost_work": Tag.ANALYTIC, "degraded": Tag.MEASURED,
    }  # fmt: skip
    larger = candidate(answer(state_bytes=10_000, detect_s=600.0, reform_s=5.0), "FT1")
    tags = {name: one.tag for name, one in larger.inputs.items()}
    assert tags == {
        "overhead": Tag.EXTRAPOLATED, "detect": Tag.GIVEN, "restore": Tag.EXTRAPOLATED, "reform": Tag.GIVEN,
        "lost_work": Tag.ANALYTIC, "degraded": Tag.MEASURED,
    }  # fmt: skip
    assert larger.tag is Tag.ANALYTIC
    assert candidate(answer(), "FT4").tag is Tag.MEASURED


def test_what_grows_with_state_interval_and_step() -> None:
    plain = candidate(answer(), "FT1")
    larger = candidate(answer(state_bytes=10_000), "FT1")
    assert larger.overhead == pytest.approx(10 * plain.overhead)
    assert larger.inputs["restore"].value == pytest.approx(1.55)
    rarer = candidate(answer(interval_steps=1000), "FT1")
    assert rarer.overhead == pytest.approx(plain.overhead / 10)
    assert rarer.inputs["lost_work"].value == pytest.approx(500 * STEP)
    slower = candidate(answer(step_s=10 * STEP), "FT1")
    assert slower.overhead == pytest.approx(plain.overhead / 10)
    assert slower.inputs["lost_work"].value == pytest.approx(500 * STEP)


def test_a_mechanism_that_saves_after_each_step_does_so_at_any_interval() -> None:
    decision = decide([*PAPER, like("FT5")], question(interval_steps=1000))
    assert candidate(decision, "FT5").inputs["lost_work"].value == pytest.approx(STEP / 2)


def test_an_architecture_that_goes_on_by_itself_is_a_candidate() -> None:
    records = [made("A6/FT9/none"), continued("A6", throughput_after=72.0)]
    decision = decide(records, question(architecture="A6"))
    assert decision.best.mechanism == "FT9"
    # One of eight ranks is missing for an hour
    assert decision.best.inputs["degraded"] == Input(pytest.approx(3600 / 8), Tag.ANALYTIC)
    sooner = decide(records, question(architecture="A6", replace_s=80.0))
    assert sooner.best.inputs["degraded"].value == pytest.approx(10)


def test_who_replaces_lost_ranks_misses_none() -> None:
    assert candidate(answer(), "FT1").inputs["degraded"] == Input(0.0, Tag.MEASURED)


def test_going_on_with_fewer_ranks_is_dearer_than_replacing_them() -> None:
    shrinking = made("A2/FT8/F1", world_after=7, restore_seconds=(0.0,), reform_seconds=(0.0,), lost_seconds=0.0)
    decision = decide([*PAPER, shrinking], question())
    assert decision.best.mechanism == "FT1"
    assert decide([*PAPER, shrinking], question(replace_s=1.0)).best.mechanism == "FT8"


def test_a_far_extrapolation_is_noted() -> None:
    console = Console(width=200, file=io.StringIO())
    console.print(render(answer(state_bytes=1e6)))
    assert "extrapolated to 1e+03 times the measured state" in console.file.getvalue()


def test_by_default_the_overhead_is_the_time_that_saves_took() -> None:
    decision = answer(by_steps=False)
    # Of FT1 0.005 s in 100 steps of 1.0048 * 0.112 s, of which they are a part
    stall = 0.005 / 100
    assert candidate(decision, "FT1").overhead == pytest.approx(stall / (1.0048 * STEP - stall), rel=1e-3)
    none = candidate(decision, "FT4").inputs["overhead"]
    assert (none.value, none.tag) == (0.0, Tag.ANALYTIC)


def test_what_began_again_is_no_choice() -> None:
    lost_all = like("FT1", "F2", fresh_starts=1, lost_steps=12)
    (obstacle,) = candidate(decide([*PAPER, lost_all], question()), "FT1").obstacles
    assert obstacle == "had nothing left to restore in 50% of its runs, and began again"


def test_halting_is_no_choice() -> None:
    with pytest.raises(
        ValueError, match="architecture='A3' has no measured recovery in the records; those with one: A2"
    ):
        decide([halted("A3"), like("FT1")], question(architecture="A3"))


@pytest.mark.parametrize(("values", "message"), [
    ({"between_failures_s": 0.0}, "between_failures_s=0.0 must be finite and more than 0"),
    ({"between_failures_s": math.inf}, "between_failures_s=inf"),
    ({"state_bytes": -1.0}, "state_bytes=-1.0"),
    ({"warning_s": -1.0}, "warning_s=-1.0 must be at least 0"),
    ({"restore_cap_s": math.nan}, "restore_cap_s=nan"),
])  # fmt: skip
def test_numbers_without_sense_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        question(**values)


def test_the_view_has_every_candidate_and_the_answer() -> None:
    console = Console(width=140, file=io.StringIO())
    console.print(render(answer(warning_s=2.0)))
    text = console.file.getvalue()
    assert "Take FT4." in text
    for name in ("FT1", "FT2", "FT4"):
        assert f"\n{name} " in text


def test_every_mechanism_of_the_paper_has_figures_to_decide_on() -> None:
    decision = decide([made("A2/FT9/none"), *(like(name) for name in PAPER_LIKE)], question(warning_s=2.0))
    assert {one.mechanism for one in decision.candidates} == set(PAPER_LIKE)
    assert decision.candidates[-1].mechanism == "FT5"

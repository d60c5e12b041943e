"""The comparison of methods: what it must say, and what it refuses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from lightning_accelpact.goodput.failures import DAY_S
from lightning_accelpact.goodput.method import outlook
from lightning_accelpact.goodput.methods import methods
from lightning_accelpact.goodput.plan import PlanRow, goodputs_by_interval, goodputs_by_size, plan
from lightning_accelpact.goodput.plan_inputs import PlanInputs
from lightning_accelpact.goodput.plan_view import duration
from lightning_accelpact.goodput.presets import LLAMA_3, LLAMA_3_405B
from lightning_accelpact.goodput.ranges import Range

LARGE: dict[str, Any] = dict(
    gpus=LLAMA_3_405B.gpus, update_s=LLAMA_3_405B.update_s, state_gb=LLAMA_3_405B.state_gb,
    checkpoint_gb_s=LLAMA_3_405B.checkpoint_gb_s, replica_gpus=128, failures=LLAMA_3,
)  # fmt: skip


def rows(**changes: Any) -> dict[str, PlanRow]:
    return {row.method.name: row for row in plan(PlanInputs(**{**LARGE, **changes}))}


def test_each_method_has_its_own_best_interval() -> None:
    found = rows()
    for row in found.values():
        for factor in (0.8, 1.25):
            other = outlook(row.method, failures_per_day=LLAMA_3.per_day(16_384), shares=LLAMA_3.shares,
                            interval_s=row.outlook.interval_s * factor)  # fmt: skip
            assert other.goodput < row.outlook.goodput
    # Fewer restarts need fewer checkpoints
    assert found["AccelPact + HEAL"].outlook.interval_s > 2 * found["cold restart"].outlook.interval_s


def test_what_survives_more_in_memory_loses_less() -> None:
    found = {name: row.outlook.lost_s_per_day for name, row in rows(paper_guard=0.0).items()}
    assert found["AccelPact + HEAL"] < found["AccelPact"] < found["paper's L1"] < found["cold restart"]


def test_without_a_second_replica_no_process_is_replaced() -> None:
    found = rows(gpus=128)
    assert found["AccelPact + HEAL"].outlook == found["AccelPact"].outlook
    assert found["torchft-like"].outlook == found["cold restart"].outlook


def test_ranges_pass_through() -> None:
    row = rows(update_s=Range(low=2, likely=6, high=8))["AccelPact"]
    # The guard's share falls with longer updates, and what is repeated grows
    assert row.goodput.low < row.goodput.likely == row.outlook.goodput < row.goodput.high
    assert row.lost_s_per_day.likely == pytest.approx(DAY_S * (1 - row.goodput.likely))
    assert rows(guard_s=0.0, repair_s=1.0, boundary_share=0.1, paper_guard=0.0)["AccelPact"].goodput > 0


def test_break_even_is_where_both_lose_the_same() -> None:
    found = rows()
    for name in ("paper's L1", "AccelPact", "AccelPact + HEAL"):
        both = [
            outlook(found[one].method, failures_per_day=found[name].break_even, shares=LLAMA_3.shares).goodput
            for one in (name, "cold restart")
        ]
        assert both[0] == pytest.approx(both[1], abs=1e-9)
    assert found["cold restart"].break_even is None
    assert found["in-job restart"].break_even == 0


def test_a_guard_too_dear_never_pays() -> None:
    assert rows(guard_s=6.0)["AccelPact"].break_even is None or rows(guard_s=6.0)["AccelPact"].break_even > 100


def test_the_simulation_stands_beside() -> None:
    for row in plan(PlanInputs(**LARGE), simulated_days=5000, seed=1):
        assert row.simulation.outlook.goodput == pytest.approx(row.outlook.goodput, abs=0.002)


def test_rows_are_plain_json() -> None:
    for row in plan(PlanInputs(**LARGE), simulated_days=20, seed=1):
        values = json.loads(json.dumps(row.to_dict(), allow_nan=False))
        assert values["goodput"]["likely"] == row.outlook.goodput
        assert values["goodput"]["likely"] + sum(values["shares"].values()) == pytest.approx(1)


def test_goodput_falls_with_the_cluster() -> None:
    for name, goodputs in goodputs_by_size(PlanInputs(**LARGE), [128, 1024, 16_384, 100_000]).items():
        falling = goodputs[1:] if "torchft" in name or "HEAL" in name else goodputs  # one replica cannot replace any
        assert falling == sorted(falling, reverse=True)


def test_an_interval_that_writing_does_not_keep_up_with_is_left_out() -> None:
    inputs = PlanInputs(**LARGE)
    found = goodputs_by_interval(inputs, [1.0, 600.0])
    assert math.isnan(found["async checkpoint"][0]) and not math.isnan(found["async checkpoint"][1])
    assert [len(values) for values in found.values()] == [2] * len(methods(inputs))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"gpus": 0}, "gpus must be a whole number of at least 1, got 0: give"),
     ({"gpus": 64}, "gpus must be at least replica_gpus=128.*got 64"),
     ({"update_s": 0.0}, "update_s must be finite and more than 0, got 0.0: give what you measure"),
     ({"update_s": Range(low=0, likely=1, high=2)}, "update_s must be finite and more than 0"),
     ({"relaunch_s": -1.0}, "relaunch_s must be finite and at least 0, got -1.0"),
     ({"boundary_share": 2.0}, "boundary_share must be finite and from 0 to 1, got 2.0: 0.1 is 10 %"),
     ({"paper_guard": math.nan}, "paper_guard must be finite and between -1 and 1, got nan"),
     ({"failures": LLAMA_3.with_rate(0.0)}, "must be more than 0, got 0")],
)  # fmt: skip
def test_impossible_inputs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlanInputs(**{**LARGE, **change})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.0, "1.0 s"), (119, "119.0 s"), (120, "2.0 min"), (7200, "2.0 h"), (2 * DAY_S, "2.0 days"), (math.inf, "never")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text

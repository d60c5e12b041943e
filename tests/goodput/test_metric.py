"""Goodput as a metric: sums over updates and ranks, and a gathering that survives a fault."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from cluster import run_ranks, values
from hypothesis import given
from hypothesis import strategies as st
from jobs_fabric import launched, striking

from lightning_accelpact.goodput import TimeClass
from lightning_accelpact.goodput.metric import GoodputMetric
from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint

amounts = st.dictionaries(st.sampled_from(list(TimeClass)), st.floats(0, 1e7), max_size=5)
records = st.lists(st.tuples(amounts, st.integers(0, 50)), min_size=1, max_size=6)


def over_ranks(parts: list[GoodputMetric]) -> dict[str, Any]:
    """What every one of these ranks computes, gathering from the others."""

    def gather(value: torch.Tensor, group: Any) -> list[torch.Tensor]:
        name = "seconds" if value.ndim else "incidents"
        return [getattr(part, name).clone() for part in parts]

    asked = copy.deepcopy(parts[0])
    asked.dist_sync_fn, asked.distributed_available_fn = gather, lambda: True
    return asked.compute()


def filled(seconds: dict[TimeClass, float], incidents: int = 0) -> GoodputMetric:
    metric = GoodputMetric()
    metric.update(seconds, incidents)
    return metric


@given(records)
def test_ranks_add_up(ranks: list[tuple[dict[TimeClass, float], int]]) -> None:
    result = over_ranks([filled(seconds, incidents) for seconds, incidents in ranks])
    for cls in TimeClass:
        assert result[f"{cls.value}_s"].item() == pytest.approx(math.fsum(seconds.get(cls, 0) for seconds, _ in ranks))
    elapsed = math.fsum(sum(seconds.values()) for seconds, _ in ranks)
    assert result["elapsed_s"].item() == pytest.approx(elapsed)
    assert result["goodput"].item() * elapsed == pytest.approx(result["productive_s"].item())
    assert result["incidents"].item() == max(incidents for _, incidents in ranks)


def test_goodput_is_the_share_of_all_ranks_seconds() -> None:
    """Not the mean of the ranks' shares, 0.75."""
    ranks = [filled({TimeClass.PRODUCTIVE: 1}), filled({TimeClass.PRODUCTIVE: 4, TimeClass.GROUP_REPAIR: 4}, 1)]
    assert over_ranks(ranks)["goodput"] == 5 / 9


def test_updates_add_up_and_reset_forgets() -> None:
    metric = filled({TimeClass.PRODUCTIVE: 1}, 1)
    metric.update({TimeClass.EVALUATION: 3}, 1)
    assert (metric.compute()["goodput"], metric.compute()["incidents"]) == (0.25, 2)
    assert metric.measure({TimeClass.PRODUCTIVE: 3, TimeClass.OTHER: 1}, 0)["goodput"] == 0.75
    metric.reset()
    metric.update({})
    assert metric.compute()["goodput"] == 0


def test_only_classes_that_have_had_time_are_logged() -> None:
    assert GoodputMetric().measure({TimeClass.PRODUCTIVE: 3.0, TimeClass.GUARD: 1.0}, 0) == {
        "goodput": 0.75,
        "goodput/elapsed_s": 4.0,
        "goodput/productive_s": 3.0,
        "goodput/guard_s": 1.0,
        "goodput/incidents": 0,
    }
    assert GoodputMetric().measure({}, 0) == {"goodput": 0, "goodput/elapsed_s": 0, "goodput/incidents": 0}


def test_days_are_counted_to_the_microsecond_in_any_model() -> None:
    metric = torch.nn.ModuleList([GoodputMetric()]).half()[0]
    metric.update({TimeClass.PRODUCTIVE: 1e7})
    metric.update({TimeClass.PRODUCTIVE: 1e-6})
    assert metric.compute()["productive_s"].item() == pytest.approx(1e7 + 1e-6, rel=1e-15)


def test_it_can_be_pickled() -> None:
    assert pickle.loads(pickle.dumps(filled({TimeClass.PRODUCTIVE: 2.0}, 3))).compute()["incidents"] == 3


@pytest.mark.parametrize(("seconds", "incidents"), [(-1.0, 0), (math.nan, 0), (math.inf, 0), (1.0, -1)])
def test_impossible_amounts_are_refused(seconds: float, incidents: int) -> None:
    metric = GoodputMetric()
    with pytest.raises(ValueError, match="finite seconds .* at least 0, got .*; to replace .* reset"):
        metric.update({TimeClass.OTHER: seconds}, incidents)
    metric.update({})
    assert metric.compute()["elapsed_s"] == 0


def measured(fault: Fault, late: bool) -> dict[str, Any]:
    """What Fabric's strategy gives on this rank, with a fault in the gathering."""
    fabric = launched(goodput=True)
    strategy = fabric.strategy
    with striking(fabric, fault, late=late):
        first = strategy.goodput_metrics()
    second = strategy.goodput_metrics()
    totals = {cls.value: seconds for cls, seconds in strategy.ledger.totals().items()}
    strategy.finish()
    return {"first": first, "second": second, "totals": totals, "incidents": len(strategy.incidents)}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", [FaultKind.SOCKETS, FaultKind.EXCEPTION], ids=lambda kind: kind.value)
def test_a_fault_in_the_gathering_is_repaired(kind: FaultKind, late: bool) -> None:
    fault = Fault(point=FaultPoint.BOUNDARY, update=0, rank=1, kind=kind)
    results = values(run_ranks(measured, 4, fault, late, timeout=90))
    for result in results:
        assert (result["first"], result["second"]) == (results[0]["first"], results[0]["second"])
        assert result["incidents"] == 1
    second = results[0]["second"]
    assert second["goodput/incidents"] == 1
    assert second["goodput/group_repair_s"] == pytest.approx(sum(one["totals"]["group_repair"] for one in results))
    assert 0 < second["goodput/elapsed_s"] - results[0]["first"]["goodput/elapsed_s"]
    assert second["goodput/elapsed_s"] <= sum(sum(one["totals"].values()) for one in results)

"""Fault plans: how they are written, what is refused, and when a fault strikes."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accelpact.recovery.fault import (
    Fault,
    FaultInjector,
    FaultKind,
    FaultPlan,
    FaultPoint,
    InjectedFault,
)
from lightning_accelpact.recovery.progress import Progress

PARSED: dict[str, dict[str, Any]] = {
    "backward@3": {"point": FaultPoint.BACKWARD, "update": 3},
    "backward@3:2": {"point": FaultPoint.BACKWARD, "update": 3, "rank": 2},
    "forward@12.1:3": {"point": FaultPoint.FORWARD, "update": 12, "micro_batch": 1, "rank": 3},
    "forward@0.0": {"point": FaultPoint.FORWARD, "update": 0, "micro_batch": 0},
    "vote@2:0:exception": {"point": FaultPoint.VOTE, "update": 2, "kind": FaultKind.EXCEPTION},
    "vote@2:exception": {"point": FaultPoint.VOTE, "update": 2, "kind": FaultKind.EXCEPTION},
    "all_reduce@1:1:sockets": {"point": FaultPoint.ALL_REDUCE, "update": 1, "rank": 1, "kind": FaultKind.SOCKETS},
    **{f"{point.value}@7": {"point": point, "update": 7} for point in FaultPoint},
}

REFUSED = [
    "", "backward", "backward@", "@3", "backward@x", "backward@-1", "backward@3:", "backward@3:-1", "backward@3.x",
    "nowhere@3", "backward@3:0:lightning", "backward@3:0:sockets:1", "backward@3 ", "Backward@3", "backward@3.5.1",
]  # fmt: skip


@pytest.mark.parametrize("text", PARSED)
def test_parse(text: str) -> None:
    assert Fault.parse(text) == Fault(**PARSED[text])


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_read_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Fault.parse(text)
    message = str(caught.value)
    assert repr(text) in message
    assert "POINT@UPDATE[.MICRO][:RANK][:KIND]" in message
    assert all(name.value in message for name in (*FaultPoint, *FaultKind))
    assert "such as backward@3:3" in message


def test_a_plan_reads_many() -> None:
    assert FaultPlan.parse(["vote@1", "step@2:3"]).faults == (
        Fault(point=FaultPoint.VOTE, update=1), Fault(point=FaultPoint.STEP, update=2, rank=3),
    )  # fmt: skip
    assert FaultPlan().faults == ()


@pytest.mark.parametrize("rank", [4, 100, -1])
def test_a_victim_that_does_not_exist_is_refused(rank: int) -> None:
    plan = FaultPlan([Fault(point=FaultPoint.VOTE, update=0), Fault(point=FaultPoint.STEP, update=0, rank=rank)])
    with pytest.raises(ValueError, match=rf"names rank {rank}; the ranks of this run are 0 to 3"):
        plan.validate(4)


def test_every_rank_that_exists_may_be_a_victim() -> None:
    FaultPlan([Fault(point=FaultPoint.VOTE, update=0, rank=rank) for rank in range(4)]).validate(4)


# -- the injector


class World:
    """One rank, its progress and the connections it has cut."""

    def __init__(self, *faults: Fault, rank: int = 0) -> None:
        self.progress = Progress(rank=rank)
        self.cuts: list[list[str] | None] = []
        self.faults = FaultInjector(
            FaultPlan(faults), progress=self.progress, cut=self._cut, clock=lambda: 12.5
        )

    def _cut(self, groups: list[str] | None) -> int:
        self.cuts.append(groups)
        return 1


def test_a_fault_strikes_once_at_its_point_and_update() -> None:
    world = World(Fault(point=FaultPoint.VOTE, update=1))
    world.faults.fire(FaultPoint.VOTE)
    world.progress.frontier = 1
    world.faults.fire(FaultPoint.STEP)
    assert (world.cuts, world.faults.struck_at) == ([], None)
    world.faults.fire(FaultPoint.VOTE)
    world.faults.fire(FaultPoint.VOTE)
    assert (world.cuts, world.faults.struck_at) == ([None], 12.5)
    assert not world.faults


def test_a_fault_of_another_rank_does_not_strike() -> None:
    world = World(Fault(point=FaultPoint.VOTE, update=0, rank=1), rank=0)
    assert not world.faults
    world.faults.fire(FaultPoint.VOTE)
    assert world.cuts == []


def test_the_exception_kind_raises_and_cuts_nothing() -> None:
    world = World(Fault(point=FaultPoint.STEP, update=0, kind=FaultKind.EXCEPTION))
    with pytest.raises(InjectedFault, match="injected: step of update 0 on rank 0"):
        world.faults.fire(FaultPoint.STEP)
    assert (world.cuts, world.faults.struck_at) == ([], 12.5)
    world.faults.fire(FaultPoint.STEP)


def test_a_named_group_is_the_only_one_cut() -> None:
    world = World(Fault(point=FaultPoint.FORWARD, update=0, group="shard"))
    world.faults.fire(FaultPoint.FORWARD)
    assert world.cuts == [["shard"]]


@pytest.mark.parametrize("point", [FaultPoint.FORWARD, FaultPoint.BACKWARD])
@pytest.mark.parametrize(("wanted", "strikes"), [(0, 0), (2, 2), (None, 3)], ids=["first", "third", "last"])
def test_the_micro_batch_is_the_one_named_or_the_last(point: FaultPoint, wanted: int | None, strikes: int) -> None:
    world = World(Fault(point=point, update=0, micro_batch=wanted))
    struck = []
    for index in range(4):
        world.progress.micro_batch = index
        world.faults.fire(point, last=index == 3)
        struck += [index] * (len(world.cuts) - len(struck))
    assert struck == [strikes]


def test_two_faults_at_one_point_strike_one_after_the_other() -> None:
    world = World(*[Fault(point=FaultPoint.VOTE, update=0)] * 2)
    for expected in (1, 2, 2):
        world.faults.fire(FaultPoint.VOTE)
        assert len(world.cuts) == expected


def test_wants_looks_at_what_is_still_to_come() -> None:
    world = World(Fault(point=FaultPoint.VOTE, update=0))
    assert world.faults.wants(FaultPoint.STEP, FaultPoint.VOTE)
    assert not world.faults.wants(FaultPoint.STEP)
    world.faults.fire(FaultPoint.VOTE)
    assert not world.faults.wants(FaultPoint.VOTE)

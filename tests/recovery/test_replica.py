"""Replicas compare what they hold: who is named, when, and what follows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_accelpact.recovery.options import HsdpShape
from lightning_accelpact.recovery.policy import FailStop
from lightning_accelpact.recovery.replica import Digests, Divergence, ReplicaGuard, compare, replicas


def test_replicas_of_a_shard_are_one_column_of_the_mesh() -> None:
    assert replicas(HsdpShape(replicate=3, shard=2)) == [[0, 2, 4], [1, 3, 5]]
    assert replicas(HsdpShape(replicate=2, shard=1)) == [[0, 1]]


def found(*values: str, name: str = "parameter/w") -> list[tuple[tuple[int, ...], bool]]:
    """Who is named when the replicas of one shard hold these."""
    digests = [{name: value} if value else {} for value in values]
    return [(one.ranks, one.certain) for one in compare(7, digests, [range(len(values))])]


CASES: dict[tuple[str, ...], list[tuple[tuple[int, ...], bool]]] = {
    ("a", "a"): [],
    ("a", "b"): [((0, 1), False)],
    ("a", "b", "a"): [((1,), True)],
    ("a", "b", "c"): [((0, 1, 2), False)],
    ("a", "a", "b", "b"): [((0, 1, 2, 3), False)],
    ("b", "a", "c", "a", "a"): [((0, 2), True)],
    ("a", "", "a"): [((1,), True)],
    ("", "a"): [((0, 1), False)],
}


@pytest.mark.parametrize("values", CASES, ids="-".join)
def test_who_is_named(values: tuple[str, ...]) -> None:
    assert found(*values) == CASES[values]


def test_shards_are_compared_with_their_own_replicas_only() -> None:
    digests = [{"parameter/w": value} for value in "xyxyxz"]
    assert compare(7, digests, [[0, 2, 4], [1, 3, 5]]) == [
        Divergence(update=7, name="parameter/w", ranks=(5,), certain=True)
    ]


def test_what_is_said() -> None:
    certain = Divergence(update=7, name="parameter/a/b.weight", ranks=(3,), certain=True)
    unsure = Divergence(update=7, name="state/0/b.weight/exp_avg", ranks=(1, 3), certain=False)
    assert str(certain) == "parameter a/b.weight on rank 3 differs from the other replicas"
    assert str(unsure) == (
        "state 0/b.weight/exp_avg differs between ranks 1 and 3, and no majority tells which of them is wrong"
    )


class World:
    """Rank 0 of two replicas; the other one holds what it is given."""

    def __init__(self, every: int = 2, policy: Any = "stop", names: int = 1) -> None:
        self.own: Digests = {f"parameter/{number}": "a" for number in range(names)}
        self.peer = dict(self.own)
        self.asked = self.gathered = 0
        self.stopped = ""
        self._progress = SimpleNamespace(frontier=0)
        self.guard = ReplicaGuard(
            every=every,
            on_divergence=policy,
            machine=SimpleNamespace(progress=self._progress, stop=SimpleNamespace(everywhere=self._stop)),
            operations=SimpleNamespace(gather_json=self._gather),
            groups=[[0, 1]],
            digests=self._digests,
        )
        self._peer_guard: list[Any] = []

    def _stop(self, reason: str) -> None:
        raise FailStop(reason)

    def _digests(self) -> Digests:
        self.asked += 1
        return self.own

    def _gather(self, message: Any) -> list[Any]:
        self.gathered += 1
        if isinstance(message, dict):
            return [message, self.peer]
        return [message, message if self.own == self.peer else "another digest"]

    def run(self, updates: int, *, at: int = 0, change: Callable[[], Any] = lambda: None) -> None:
        """Apply updates up to this one, of two micro-batches each; ``change`` comes after one of them."""
        while self._progress.frontier < updates:
            self.guard.check()
            self._progress.frontier += 1
            if self._progress.frontier == at:
                change()
            self.guard.check()

    def spoil(self, *numbers: int) -> None:
        self.peer |= {f"parameter/{number}": "b" for number in numbers}


def test_it_compares_every_so_many_updates_once() -> None:
    world = World(every=3)
    world.run(10)
    assert (world.asked, world.gathered) == (3, 3)


def test_off_it_does_nothing() -> None:
    world = World(every=0)
    world.spoil(0)
    world.run(10)
    assert (world.asked, world.gathered, world.guard.divergences) == (0, 0, [])


def test_a_divergence_stops_the_run_at_the_next_comparison() -> None:
    world = World()
    with pytest.raises(FailStop) as caught:
        world.run(10, at=5, change=lambda: world.spoil(0))
    assert str(caught.value) == (
        "after update 6 replicas hold different bits: parameter 0 differs between ranks 0 and 1, and no majority tells"
        " which of them is wrong. They last agreed after update 4: a checkpoint written later may hold the error"
    )
    assert world.guard.divergences == [Divergence(update=6, name="parameter/0", ranks=(0, 1), certain=False)]


def test_a_warning_is_given_once_for_each_parameter(caplog: pytest.LogCaptureFixture) -> None:
    world = World(policy="warn", names=3)
    with caplog.at_level(logging.WARNING, "accelpact"):
        world.run(6, at=3, change=lambda: world.spoil(0))
        world.run(12, at=9, change=lambda: world.spoil(2))
    texts = [record.getMessage().partition(" differs")[0] for record in caplog.records]
    assert texts == [
        "after update 4 replicas hold different bits: parameter 0",
        "after update 10 replicas hold different bits: parameter 2",
    ]
    assert [(one.update, one.name) for one in world.guard.divergences] == [(4, "parameter/0"), (10, "parameter/2")]


def test_a_long_list_is_cut_short() -> None:
    world = World(names=8)
    world.spoil(*range(8))
    with pytest.raises(FailStop, match="and 3 more"):
        world.run(2)

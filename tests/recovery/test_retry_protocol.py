"""Retried collectives: no result twice, none skipped, none of another collective, nobody waits for ever."""

from __future__ import annotations

import pytest
from recovery.retry_protocol import PROGRAM, Rank, RetryProtocol, State, explore

from lightning_accelpact.recovery.action import Decision


@pytest.mark.parametrize(
    ("faults", "unwinding", "states"), [(0, False, 108), (1, False, 3_646), (2, False, 16_734), (1, True, 6_112), (2, True, 34_131)]
)
def test_every_reachable_state_keeps_the_promises(faults: int, unwinding: bool, states: int) -> None:
    seen, trace = explore(RetryProtocol(faults=faults, unwinding=unwinding))
    assert trace == []
    assert seen == states


class NobodyServes(RetryProtocol):
    """Those that have finished go on at once."""

    @staticmethod
    def plan(i: int, decision: Decision) -> tuple[tuple[str, int], ...]:
        return ()


class OwnOrder(RetryProtocol):
    """Each rank serves its groups in an order of its own."""

    @staticmethod
    def plan(i: int, decision: Decision) -> tuple[tuple[str, int], ...]:
        return RetryProtocol.plan(i, decision)[:: -1 if i == 1 else 1]


class AgainAfterwards(RetryProtocol):
    """A collective that the pass has finished runs once more."""

    def going_on(self, i: int, rank: Rank) -> dict:
        changes = super().going_on(i, rank)
        if changes["at"] != "out" or not rank.position or rank.verb != "retry":
            return changes
        before = rank._replace(position=rank.position - 1)
        return {"at": "in", "flying": True, "position": before.position, "begun": self.beginning(i, before)}


class Remembers(RetryProtocol):
    """A rank that was not unwound itself does not count anew when the update runs again."""

    def going_on(self, i: int, rank: Rank) -> dict:
        changes = super().going_on(i, rank)
        return changes if rank.unwound or "finished" not in changes else {**changes, "finished": rank.finished}


class Deaf(RetryProtocol):
    """A rank inside a collective is not interrupted."""

    def steps(self, state: State, i: int, rank: Rank):
        return (step for step in super().steps(state, i, rank) if step[0] != "is interrupted")


BROKEN = {
    OwnOrder: "an end",
    NobodyServes: "an end",
    AgainAfterwards: "once each",
    Remembers: "the same one",
    Deaf: "an end",
}


@pytest.mark.parametrize("variant", BROKEN, ids=lambda variant: variant.__name__)
def test_broken_variants_are_caught(variant: type[RetryProtocol]) -> None:
    _, trace = explore(variant(faults=2, unwinding=True))
    print(*trace, sep="\n")
    assert trace, "not caught"
    assert trace[-1].startswith(BROKEN[variant])


def test_the_program_overlaps() -> None:
    """Some rank is in all groups, and no rank in the same ones as another: else the order would not matter."""
    assert len({frozenset(program) for program in PROGRAM.values()}) == len(PROGRAM)

"""Retries on streams: no result twice, none skipped or spoilt, none of another collective, nobody waits for ever."""

from __future__ import annotations

import pytest
from recovery.retry_protocol import explore
from recovery.stream_protocol import Rank, StreamProtocol

from lightning_accelpact.recovery.action import Decision


@pytest.mark.parametrize(
    ("faults", "unwinding", "states"), [(0, False, 1_046), (1, False, 69_292), (1, True, 107_229), (2, False, 379_695)]
)
def test_every_reachable_state_keeps_the_promises(faults: int, unwinding: bool, states: int) -> None:
    seen, trace = explore(StreamProtocol(faults=faults, unwinding=unwinding))
    assert trace == []
    assert seen == states


class NobodyServes(StreamProtocol):
    """Those that have finished go on at once."""

    @staticmethod
    def plan(i: int, decision: Decision) -> tuple[tuple[str, int], ...]:
        return ()


class OnlyTheNewest(StreamProtocol):
    """Only the last of those in doubt runs again."""

    @staticmethod
    def plan(i: int, decision: Decision) -> tuple[tuple[str, int], ...]:
        return tuple(dict(StreamProtocol.plan(i, decision)).items())


class LeftBehind(StreamProtocol):
    """What nobody has finished is not put on its way again."""

    def set_out_again(self, rank: Rank) -> Rank:
        return rank


class Trusting(StreamProtocol):
    """A rank goes on although something that it has consumed was under way."""

    @staticmethod
    def is_whole(rank: Rank) -> bool:
        return True


BROKEN = {
    NobodyServes: "the same one",
    OnlyTheNewest: "an end",
    LeftBehind: "an end",
    Trusting: "nothing spoilt",
}


@pytest.mark.parametrize("variant", BROKEN, ids=lambda variant: variant.__name__)
def test_broken_variants_are_caught(variant: type[StreamProtocol]) -> None:
    _, trace = explore(variant(faults=1, unwinding=True))
    print(*trace, sep="\n")
    assert trace, "not caught"
    assert trace[-1].startswith(BROKEN[variant])

"""The boundary protocol, explored state by state, and broken variants that the exploration must catch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from recovery.explorer import explore
from recovery.protocol import (
    AGREE,
    BACKWARD,
    CAST,
    COMMIT,
    COMMITTED,
    ENDED,
    FAULTS,
    FORWARD,
    OVER,
    PREPARED,
    STEPPING,
    WAIT,
    Event,
    Protocol,
    Rank,
    State,
    held,
    move,
    over,
)

from lightning_accelpact.recovery.action import Action, Decision

ROLL_FORWARD, REDO, PRESERVE, RESTART = (
    Action.ROLL_FORWARD.value,
    Action.REDO.value,
    Action.PRESERVE.value,
    Action.RESTART.value,
)
ENDS_OF_A_LOSS = {("ended", "ended", "lost"), ("lost", "stopped", "stopped")}


def test_three_ranks_two_updates_any_two_faults():
    protocol = Protocol(world=3, updates=2, faults=2, budget=2)
    seen = explore(protocol)
    print(seen)
    assert not seen.violation, seen
    # Floors, so that the exploration cannot shrink without anybody noticing
    assert seen.states >= 220_000 and seen.events >= 740_000
    assert set(seen.kinds) == {"main", "monitor", "deadline", *FAULTS}
    assert {("ended",) * 3, ("stopped",) * 3, *ENDS_OF_A_LOSS} <= set(seen.ends)
    assert set(protocol.decisions) == {(PRESERVE,) * 3, (ROLL_FORWARD,) * 3, (REDO,) * 3, (RESTART,) * 3}


@pytest.mark.parametrize(
    ("configuration", "floor"),
    [
        pytest.param({"faults": 0}, 99, id="no fault"),
        pytest.param({"world": 2, "updates": 1, "faults": 3, "budget": 3}, 74_000, id="three faults"),
        pytest.param({"world": 4, "updates": 1, "faults": 1}, 31_000, id="four ranks"),
        pytest.param({"updates": 3, "faults": 1}, 15_000, id="three updates"),
        pytest.param({"world": 2, "budget": 1}, 8_000, id="more faults than budget"),
    ],
)
def test_other_sizes(configuration: dict[str, int], floor: int):
    seen = explore(Protocol(**configuration))
    print(seen)
    assert not seen.violation, seen
    assert seen.states >= floor


def test_without_faults_there_is_one_end_and_no_repair():
    protocol = Protocol(faults=0)
    seen = explore(protocol)
    assert seen.ends == {("ended",) * 3: 1}
    assert not protocol.decisions and set(seen.kinds) == {"main"}


# -- what the protocol does not need


class UnsynchronizedCollectives(Protocol):
    """A rank completes its gradients whatever its peers do, as if an update's collectives did not synchronize."""

    def backward(self, state: State, i: int) -> Iterator[Event]:
        yield from self.interruption(state, i)
        rank = state.ranks[i]
        done = {"at": CAST, "phase": PREPARED, "gradients": ((rank.generation, rank.frontier),)}
        yield Event("main", i, "completes its gradients", move(state, i, **done))


def test_the_vote_does_not_lean_on_the_collectives():
    seen = explore(UnsynchronizedCollectives(faults=1))
    print(seen)
    assert not seen.violation, seen
    assert seen.states >= 28_000


class RollsForwardLater(Protocol):
    """As the product does it: after a fault a rank enters the repair as PREPARED, whatever its update's vote says."""

    def obey(self, state: State, i: int) -> Iterator[Event]:
        if state.ranks[i].frontier == self.updates:
            yield from super().obey(state, i)
        else:
            yield Event("main", i, "does not look at the vote", self.enter(state, i))


@pytest.mark.parametrize(
    ("configuration", "floor"),
    [
        pytest.param({"updates": 1}, 200_000, id="two faults"),
        pytest.param({"faults": 1}, 17_000, id="two updates"),
    ],
)
def test_a_passed_vote_may_be_carried_out_by_the_repair(configuration: dict[str, int], floor: int):
    protocol = RollsForwardLater(**configuration)
    seen = explore(protocol)
    print(seen)
    assert not seen.violation, seen
    assert seen.states >= floor
    # PREPARED one update behind a peer that has stepped: what decide() needs that row of its table for
    assert (PRESERVE, PRESERVE, ROLL_FORWARD) in protocol.decisions


class BelievesItself(Protocol):
    """A rank that meets a fault in a repair goes on to the next one, whatever stands in the release's register."""

    def abandon(self, state: State, i: int) -> Iterator[Event]:
        yield Event("main", i, "does not look at the release", self.enter(state, i))


def test_the_release_is_a_second_line_of_defence():
    seen = explore(BelievesItself(world=2, updates=1))  # two faults, in the same repair or one after the other
    print(seen)
    assert not seen.violation, seen


# -- broken variants: each must be caught, and by which promise


class SkipsTheVote(Protocol):
    """A rank steps as soon as its own gradients are complete."""

    def cast(self, state: State, i: int) -> Iterator[Event]:
        yield Event("main", i, "steps without a vote", move(state, i, at=STEPPING, phase=STEPPING))


class RetriesAnAdd(Protocol):
    """Votes are counted with an ``add`` that is tried again after an error."""

    def voted(self, state: State, i: int) -> State:
        rank = state.ranks[i]
        return move(state, i, votes=tuple(sorted((*rank.votes, self.vote_key(rank)))))


class RedoesAfterCommit(Protocol):
    """A notice makes a waiting rank drop its gradients, although the vote may have passed."""

    def wait(self, state: State, i: int) -> Iterator[Event]:
        if state.ranks[i].heard > state.ranks[i].target:
            dropped = move(state, i, phase=FORWARD, gradients=())
            yield Event("main", i, "drops its gradients", self.enter(dropped, i))
        else:
            yield from super().wait(state, i)


class SharesVotesBetweenGenerations(Protocol):
    """The keys of a vote do not name the generation."""

    def vote_key(self, rank: Rank) -> tuple[int, int]:
        return (0, rank.frontier)

    def read(self, key: tuple[int, int], live: list[Rank]) -> bool:
        return any(key[1] >= rank.frontier for rank in live)


class SharesCountsBetweenGenerations(Protocol):
    """The register of a vote names the generation, the votes that are counted do not."""

    def voted(self, state: State, i: int) -> State:
        rank = state.ranks[i]
        return move(state, i, votes=tuple(sorted({*rank.votes, (0, rank.frontier)})))

    def counted(self, state: State, key: tuple[int, int]) -> int:
        return super().counted(state, (0, key[1]))

    def read(self, key: tuple[int, int], live: list[Rank]) -> bool:
        return any(key[1] >= rank.frontier for rank in live)


class SharesReportsBetweenRepairs(Protocol):
    """The keys of the reports do not name the repair."""

    def report_key(self, rank: Rank) -> int:
        return 1

    def trimmed(self, rank: Rank, live: list[Rank], repair: int, settled: int) -> Rank:
        return super().trimmed(rank, live, min(repair, 1), settled)


class RollsIncompleteGradientsForward(Protocol):
    """The decision takes BACKWARD for PREPARED."""

    def decide(self, generation: int, reports: tuple[tuple[str, int], ...]) -> Decision:
        decision = super().decide(generation, reports)
        if {phase for phase, _ in reports} <= {BACKWARD, PREPARED}:
            return replace(decision, verbs=(Action.ROLL_FORWARD,) * len(reports))
        return decision


class LeavesAlone(Protocol):
    """A rank ends as soon as it has applied all updates: there is no closing vote."""

    def begin(self, state: State, i: int) -> Iterator[Event]:
        if state.ranks[i].frontier == self.updates:
            yield Event("main", i, "ends", over(state, i, ENDED))
        else:
            yield from super().begin(state, i)


class DisobeysItsClosingVote(Protocol):
    """A rank that meets a fault in its closing vote repairs, whatever stands in the vote's register."""

    def obey(self, state: State, i: int) -> Iterator[Event]:
        if state.ranks[i].frontier == self.updates:
            yield Event("main", i, "does not look at the closing vote", self.enter(state, i))
        else:
            yield from super().obey(state, i)


class NeverLooksBeforeItWaits(Protocol):
    """A notice that came before a rank began to wait for the reports wakes nobody."""

    def report(self, state: State, i: int) -> Iterator[Event]:
        yield Event("main", i, "reports without a look at the notices", self.reported(state, i, at=AGREE))


class SleepsThroughNotices(Protocol):
    """The monitor thread does not end the wait for a vote."""

    def woken(self, state: State, i: int) -> State:
        return state if state.ranks[i].at in (COMMIT, WAIT) else super().woken(state, i)


class ActsOnOldNotices(Protocol):
    """A monitor thread that runs late ends a wait of the generation that its notice had called."""

    def enter(self, state: State, i: int) -> State:
        after = super().enter(state, i)
        return after if after.ranks[i].at in OVER else move(after, i, heard=state.ranks[i].heard)


class StopsSilently(Protocol):
    """A rank whose budget is used up does not tell the others."""

    def enter(self, state: State, i: int) -> State:
        return super().enter(state, i)._replace(stop=False)


@pytest.mark.parametrize(
    ("broken", "promise"),
    [
        (SkipsTheVote, "prepared"),
        (RetriesAnAdd, "prepared"),
        (RedoesAfterCommit, "prepared"),
        (SharesVotesBetweenGenerations, "cause"),
        (SharesCountsBetweenGenerations, "prepared"),
        (SharesReportsBetweenRepairs, "recovery"),
        (RollsIncompleteGradientsForward, "exactly once"),
        (LeavesAlone, "no idle wait"),
        (DisobeysItsClosingVote, "no idle wait"),
        (NeverLooksBeforeItWaits, "no idle wait"),
        (SleepsThroughNotices, "no idle wait"),
        (StopsSilently, "no idle wait"),
        (ActsOnOldNotices, "cause"),
    ],
)
def test_a_broken_protocol_is_caught(broken: type[Protocol], promise: str):
    seen = explore(broken(world=2, updates=1, faults=2, kinds=("exception", "retry")))
    print(f"{broken.__doc__}\n{seen}")
    assert seen.violation.startswith(f"{promise}:"), seen
    assert seen.trace


# -- the explorer itself


class Repents(Protocol):
    """A rank may go back from its forward to where it was before."""

    def forward(self, state: State, i: int) -> Iterator[Event]:
        yield Event("main", i, "goes back", move(state, i, at=COMMITTED, phase=COMMITTED))
        yield from super().forward(state, i)


class NeverGivesUp(Protocol):
    """No wait has a deadline."""

    def deadline(self, state: State, i: int) -> Event:
        return super().deadline(state, i)._replace(kind="loss", state=state)


def test_a_livelock_is_found():
    assert explore(Repents(faults=0)).violation.startswith("no livelock")


def test_a_deadlock_is_found():
    assert explore(NeverGivesUp(updates=1, faults=1)).violation.startswith("no deadlock")


def test_the_trace_is_the_shortest_one_and_keeps_the_ranks_apart():
    seen = explore(SkipsTheVote(world=2, updates=1, faults=0))
    assert seen.trace == [
        "  1 [main] rank 0 begins update 0",
        "  2 [main] rank 1 begins update 0",
        "  3 [main] rank 0 begins its backward",
        "  4 [main] rank 1 begins its backward",
        "  5 [main] rank 0 completes its gradients",
        "  6 [main] rank 0 steps without a vote",
        "  7 [main] rank 0 applies update 0",
    ]


def test_a_bound_is_not_mistaken_for_a_proof():
    with pytest.raises(RuntimeError, match="more than 50 states"):
        explore(Protocol(), limit=50)


class Unreduced(Protocol):
    """Ranks are told apart and nothing is forgotten."""

    def __init__(self, **options: int) -> None:
        super().__init__(**options)
        self.reduced: set[State] = set()

    def canonical(self, state: State) -> State:
        self.reduced.add(super().canonical(state))
        return state


def test_the_reduction_loses_no_state():
    every, reduced = Unreduced(world=2, faults=1), Protocol(world=2, faults=1)
    states = explore(every).states
    assert not explore(every).violation
    assert len(every.reduced) == explore(reduced).states < states / 2


def test_a_register_is_written_once():
    protocol = Protocol(world=2, updates=1, faults=0)
    state = move(protocol.initial(), 0, at=WAIT, phase=PREPARED)
    _, first = protocol.obeyed(state, 0, "fault")
    text, _ = protocol.obeyed(move(first, 1, at=COMMIT, phase=PREPARED), 1, "commit")
    assert held(first.votes, (0, 0)) == "fault" and text.endswith("fault")

"""An explicit-state model of collectives that are run again in place; docs/protocol.md says what is modelled.

Ranks run a program of collectives on overlapping groups. On a group the m-th collective that one member begins meets the
m-th of every other member, whatever they think it is: that is all that a communicator knows, and the model remembers for
each what was really meant. The decision is the product's own :func:`~lightning_accelpact.recovery.action.decide`.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from lightning_accelpact.recovery.action import Action, Decision, GroupReport, Phase, RankReport, decide

GROUPS = {"a": (0, 1), "b": (1, 2), "w": (0, 1, 2)}
PROGRAM = {0: "waw", 1: "wabw", 2: "wbw"}  # the groups of a rank's collectives, in order

# Places of a rank
OUT = "out"  # computes, and begins its next collective next
IN = "in"  # inside a collective
REPORT = "report"  # has reported for a repair
PASS = "pass"  # serves, or about to
RELEASE = "release"  # has served all and waits for the others
END = "end"  # has come to its vote

Meant = tuple[int, int]  # (attempt of the update, number of the collective in its group)


class Rank(NamedTuple):
    """One rank. ``attempt`` and ``results`` are only read by the checks."""

    at: str = OUT
    position: int = 0  # in its program
    flying: bool = False  # inside a collective of its program, also while it is in a repair
    unwound: bool = False
    finished: tuple[tuple[str, int], ...] = ()
    generation: int = 0  # of its communicators
    target: int = 0  # the repair it is in, or was in last
    begun: tuple[tuple[str, tuple[Meant, ...]], ...] = ()  # on the communicators of its generation
    plan: tuple[tuple[str, int], ...] = ()  # what it still has to serve: groups with the number of their newest
    serving: bool = False  # has begun the first of them
    verb: str = ""
    attempt: int = 0
    results: tuple[str, ...] = ()  # of its program: the groups whose collectives it has got, in order


class State(NamedTuple):
    """Everything that the future depends on."""

    ranks: tuple[Rank, ...]
    notice: int = 0
    released: int = 0  # the newest repair that all ranks have done their part of
    faults: int = 0  # still to come


def lookup(pairs: tuple, key: str, default: object) -> object:
    return next((value for name, value in pairs if name == key), default)


def put(pairs: tuple, key: str, value: object) -> tuple:
    return tuple(sorted({**dict(pairs), key: value}.items()))


@cache
def decided(generation: int, answers: tuple) -> Decision:
    """The product's decision about (place, unwound, groups) of every rank."""
    return decide(
        [
            RankReport(
                rank=rank,
                generation=generation,
                frontier=0,
                phase=Phase.PREPARED if ended else Phase.FORWARD,
                in_place=not unwound,
                groups={name: GroupReport(finished=n, pending=int(fly), kept=min(n, 1)) for name, n, fly in groups},
            )
            for rank, (ended, unwound, groups) in enumerate(answers)
        ]
    )


class RetryProtocol:
    """The protocol of retries. Broken variants override single methods.

    Args:
        faults: Number of faults, anywhere: a collective that fails on one rank, or an exception that unwinds a pass.
        unwinding: Whether the latter may happen.
    """

    def __init__(self, *, faults: int, unwinding: bool = False) -> None:
        self.faults = faults
        self.unwinding = unwinding

    def initial(self) -> State:
        return State(ranks=(Rank(),) * len(PROGRAM), faults=self.faults)

    # -- the rank's steps

    def following(self, state: State) -> Iterator[tuple[str, State]]:
        """Every event that can happen, with the state after it."""
        for i, rank in enumerate(state.ranks):
            for text, changes in self.steps(state, i, rank):
                yield f"rank {i} {text}", self.moved(state, i, changes)
            yield from self.strikes(state, i, rank)

    @staticmethod
    def moved(state: State, i: int, changes: dict) -> State:
        rank = state.ranks[i]._replace(**changes)
        ranks = (*state.ranks[:i], rank, *state.ranks[i + 1 :])
        together = all(other.at == RELEASE and other.target == rank.target for other in ranks)
        return state._replace(ranks=ranks, released=rank.target if together else state.released)

    def steps(self, state: State, i: int, rank: Rank) -> Iterator[tuple[str, dict]]:
        called = state.notice > rank.target
        if rank.at == OUT:
            if called:
                yield "hears of the repair", self.joining(state, rank)
            yield from self.begin(i, rank)
        elif rank.at == IN:
            if self.met(state, i, PROGRAM[i][rank.position]):
                yield "finishes", self.finish(i, rank) | {"at": OUT}
            if called:
                yield "is interrupted", self.joining(state, rank)
        elif rank.at == RELEASE and state.released == rank.target:
            yield "goes on", self.going_on(i, rank)
        elif called:
            yield "starts the repair again, or is interrupted in its vote", self.joining(state, rank)
        elif rank.at in (REPORT, PASS):
            yield from self.repair(state, i, rank)

    def begin(self, i: int, rank: Rank) -> Iterator[tuple[str, dict]]:
        if rank.position == len(PROGRAM[i]):
            yield "votes", {"at": END}
        else:
            yield "begins", {"at": IN, "flying": True, "begun": self.beginning(i, rank)}

    @staticmethod
    def beginning(i: int, rank: Rank) -> tuple:
        group = PROGRAM[i][rank.position]
        number = lookup(rank.finished, group, 0) + 1
        return put(rank.begun, group, (*lookup(rank.begun, group, ()), (rank.attempt, number)))

    @staticmethod
    def met(state: State, i: int, group: str) -> bool:
        """Whether every member has begun what this rank's newest collective on the group meets."""
        rank = state.ranks[i]
        index = len(lookup(rank.begun, group, ()))
        return all(
            state.ranks[j].generation == rank.generation and len(lookup(state.ranks[j].begun, group, ())) >= index
            for j in GROUPS[group]
        )

    @staticmethod
    def finish(i: int, rank: Rank) -> dict:
        group = PROGRAM[i][rank.position]
        return {
            "flying": False,
            "position": rank.position + 1,
            "finished": put(rank.finished, group, lookup(rank.finished, group, 0) + 1),
            "results": (*rank.results, group),
        }

    # -- the repair

    @staticmethod
    def joining(state: State, rank: Rank) -> dict:
        return {"at": REPORT, "target": state.notice, "plan": (), "serving": False}

    @staticmethod
    def answer(i: int, rank: Rank) -> tuple:
        flying = PROGRAM[i][rank.position] if rank.flying and not rank.unwound else ""
        names = sorted({name for name, _ in rank.finished} | {flying} - {""})
        groups = tuple((name, lookup(rank.finished, name, 0), name == flying) for name in names)
        return rank.position == len(PROGRAM[i]), rank.unwound, groups

    def repair(self, state: State, i: int, rank: Rank) -> Iterator[tuple[str, dict]]:
        if rank.at == REPORT:
            # Nobody moves on before all have rebuilt, so all decide on the same reports
            if all(other.target == rank.target and other.at in (REPORT, PASS) for other in state.ranks):
                decision = decided(rank.target, tuple(self.answer(j, other) for j, other in enumerate(state.ranks)))
                plan = self.plan(i, decision)
                yield "rebuilds", {
                    "at": PASS, "generation": rank.target, "begun": (), "plan": plan, "verb": decision.verbs[i].value
                }  # fmt: skip
        elif rank.at == PASS and all(other.target == rank.target and other.at != REPORT for other in state.ranks):
            yield from self.serve(state, i, rank)

    @staticmethod
    def plan(i: int, decision: Decision) -> tuple[tuple[str, int], ...]:
        """What a rank serves, in order."""
        return tuple((group, number) for group, numbers in decision.serve.items() if i in GROUPS[group] for number in numbers)

    def serve(self, state: State, i: int, rank: Rank) -> Iterator[tuple[str, dict]]:
        if not rank.plan:
            yield "has served", {"at": RELEASE}
            return
        (group, newest), rest = rank.plan[0], rank.plan[1:]
        late = lookup(rank.finished, group, 0) < newest
        if not rank.serving:
            meant = (rank.attempt, lookup(rank.finished, group, 0) + late)
            begun = put(rank.begun, group, (*lookup(rank.begun, group, ()), meant))
            yield f"begins {group} again", {"serving": True, "begun": begun}
        elif self.met(state, i, group):
            own = self.finish(i, rank) if late else {}
            yield f"is done with {group}", {"serving": False, "plan": rest, **own}

    def going_on(self, i: int, rank: Rank) -> dict:
        if rank.verb == Action.REDO.value:
            return {
                "at": OUT, "position": 0, "flying": False, "unwound": False, "finished": (), "results": (),
                "attempt": rank.attempt + 1,
            }  # fmt: skip
        if rank.flying:  # not finished by the pass
            return {"at": IN, "begun": self.beginning(i, rank)}
        return {"at": END if rank.position == len(PROGRAM[i]) else OUT}

    # -- faults

    def strikes(self, state: State, i: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if not state.faults:
            return
        called = state._replace(notice=state.notice + 1, faults=state.faults - 1)
        if rank.at == IN or (rank.at == PASS and rank.serving):
            yield f"rank {i} fails in its collective", self.moved(called, i, self.joining(called, rank))
        if self.unwinding and rank.at == OUT:
            yield f"rank {i} is unwound", self.moved(called, i, {**self.joining(called, rank), "unwound": True})

    # -- promises

    def broken(self, state: State) -> str:
        """Which promise a state breaks; empty if none."""
        for i, rank in enumerate(state.ranks):
            if rank.results != tuple(PROGRAM[i][: rank.position]):
                return f"once each: rank {i} has got {rank.results} at place {rank.position} of its program"
        for group, members in GROUPS.items():
            for i in members:
                for j in members:
                    if not self.agree(state.ranks[i], state.ranks[j], group):
                        return f"the same one: ranks {i} and {j} have met in different collectives of {group}"
        return ""

    @staticmethod
    def agree(one: Rank, other: Rank, group: str) -> bool:
        pairs = zip(lookup(one.begun, group, ()), lookup(other.begun, group, ()), strict=False)
        return one.generation != other.generation or all(a == b for a, b in pairs)

    @staticmethod
    def unfinished(state: State) -> str:
        """What is wrong with a state in which nothing happens any more; empty if nothing is."""
        if any(rank.at != END for rank in state.ranks):
            return f"an end: ranks wait for ever at {[rank.at for rank in state.ranks]}"
        return "" if len({rank.attempt for rank in state.ranks}) == 1 else "one attempt: ranks end in different ones"


def explore(protocol: RetryProtocol, *, limit: int = 1_000_000) -> tuple[int, list[str]]:
    """Visit every reachable state breadth first; the number of states, and the shortest way to a broken promise.

    Raises:
        RuntimeError: if there are more than ``limit`` states.
    """
    first = protocol.initial()
    parents: dict[State, tuple[State, str] | None] = {first: None}
    waiting = [first]
    for state in waiting:
        following = list(protocol.following(state))
        wrong = protocol.broken(state)
        if not wrong and all(after.faults < state.faults for _, after in following):
            wrong = protocol.unfinished(state)
        if wrong:
            return len(parents), [*_path(parents, state), wrong]
        for text, after in following:
            if after not in parents:
                parents[after] = (state, text)
                waiting.append(after)
        if len(parents) > limit:
            raise RuntimeError(f"more than {limit} states: raise the limit or explore a smaller configuration")
    return len(parents), []


def _path(parents: dict[State, tuple[State, str] | None], state: State) -> list[str]:
    lines = []
    while parents[state] is not None:
        state, text = parents[state]
        lines.append(text)
    return lines[::-1]

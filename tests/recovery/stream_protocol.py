"""An explicit-state model of retries on streams: the host is ahead of its collectives; docs/protocol.md says what is modelled.

As in ``retry_protocol.py`` the m-th collective that one member begins on a group meets the m-th of every other, and the
decision is the product's own. Here a rank goes on right after it has begun a collective of its pass, and learns at the
end of the pass what has become of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from recovery.retry_protocol import lookup, put

from lightning_accelpact.recovery.action import Action, Decision, GroupReport, Phase, RankReport, decide

GROUPS = {"x": (0, 1), "y": (1, 2), "z": (0, 2)}
# In lower case collectives whose results are consumed at once, in capitals those that are deferred; "|" is the end of the
# pass, and "!" comes after a collective that the host waits for
PROGRAM = {0: ("x", "Z", "Z", "|", "x!"), 1: ("x", "Y", "|", "x!"), 2: ("Y", "Z", "Z", "|")}

# Places of a rank
GOING = "going"  # about to do the next item of its program
WAITING = "waiting"  # for the collective of the current item
END = "end"  # has come to its vote
REPORT, SERVE, RELEASE = "report", "serve", "release"  # in a repair

Meant = tuple[int, int]  # (attempt of the update, number of the collective in its group)
CONSUMED, DEFERRED, CALLED = "consumed", "deferred", "called"


class Rank(NamedTuple):
    """One rank. ``attempt`` and ``spoilt`` are only read by the checks."""

    at: str = GOING
    position: int = 0
    unwound: bool = False
    whole: bool = True  # until it is found not to be; then for good, until the repair is over
    cut: bool = False  # its links
    generation: int = 0
    target: int = 0
    begun: tuple[tuple[str, tuple[Meant, ...]], ...] = ()  # on the communicators of its generation
    under_way: tuple[tuple[str, tuple[str, ...]], ...] = ()  # what it has begun and not finished, oldest first
    failed: tuple[str, ...] = ()  # groups on which nothing comes to an end any more
    finished: tuple[tuple[str, int], ...] = ()
    kept: tuple[tuple[str, int], ...] = ()
    plan: tuple[tuple[str, int], ...] = ()
    serving: bool = False
    verb: str = ""
    attempt: int = 0
    spoilt: bool = False  # goes on with what an aborted collective has left behind


class State(NamedTuple):
    """Everything that the future depends on. ``gentle`` is whether the newest notice lets passes go on."""

    ranks: tuple[Rank, ...]
    notice: int = 0
    gentle: bool = False
    released: int = 0
    faults: int = 0


def count(rank: int, group: str) -> int:
    """How many collectives of a group that are counted a rank's program has."""
    return sum(item[0].lower() == group and (item.isupper() or item.endswith("!")) for item in PROGRAM[rank])


@cache
def decided(generation: int, answers: tuple) -> Decision:
    """The product's decision about (ended, in place, groups) of every rank."""
    return decide(
        [
            RankReport(
                rank=rank,
                generation=generation,
                frontier=0,
                phase=Phase.PREPARED if ended else Phase.BACKWARD,
                in_place=in_place,
                groups={name: GroupReport(finished=n, pending=pending, kept=kept) for name, n, pending, kept in groups},
            )
            for rank, (ended, in_place, groups) in enumerate(answers)
        ]
    )


class StreamProtocol:
    """The protocol of retries on streams. Broken variants override single methods.

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
            for text, after in self.steps(state, i, rank):
                yield f"rank {i} {text}", after
            for text, after in self.strikes(state, i, rank):
                yield f"rank {i} {text}", after

    @staticmethod
    def moved(state: State, i: int, rank: Rank) -> State:
        ranks = (*state.ranks[:i], rank, *state.ranks[i + 1 :])
        together = all(other.at == RELEASE and other.target == rank.target for other in ranks)
        return state._replace(ranks=ranks, released=rank.target if together else state.released)

    def steps(self, state: State, i: int, rank: Rank) -> Iterator[tuple[str, State]]:
        called = state.notice > rank.target
        if rank.at in (REPORT, SERVE, RELEASE):
            yield from self.repair(state, i, rank, called)
            return
        for group, _ in rank.under_way:
            if self.ends(state, i, rank, group):
                yield f"gets a result on {group}", self.moved(state, i, self.with_result(rank, group))
        if called and not rank.cut and (not state.gentle or self.goes_on(i, rank)):
            yield "is interrupted", self.moved(state, i, rank._replace(cut=True))  # or its patience ends
        if called and not (state.gentle and self.goes_on(i, rank)):
            yield "hears of the repair", self.call(state, i, rank)
        elif rank.at == GOING:
            yield from self.goes(state, i, rank)
        elif rank.at == WAITING and (rank.cut or self.group(i, rank) in rank.failed):
            yield "finds that its collective has failed", self.call(state, i, rank)

    @staticmethod
    def group(i: int, rank: Rank) -> str:
        return PROGRAM[i][rank.position][0].lower()

    @staticmethod
    def goes_on(i: int, rank: Rank) -> bool:
        """Whether a gentle notice lets it come to the end of its pass first."""
        return rank.at == GOING and rank.position < PROGRAM[i].index("|")

    def goes(self, state: State, i: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if rank.position == len(PROGRAM[i]):
            yield "votes", self.moved(state, i, rank._replace(at=END))
            return
        item = PROGRAM[i][rank.position]
        if item == "|":
            yield from self.settles(state, i, rank)
        elif item.endswith("!"):
            yield "begins and waits", self.moved(state, i, self.begin(i, rank, CALLED)._replace(at=WAITING))
        elif rank.cut and item.islower():
            yield "cannot begin", self.call(state, i, rank._replace(unwound=True))
        else:
            begun = self.begin(i, rank, CONSUMED if item.islower() else DEFERRED)
            yield "begins", self.moved(state, i, begun._replace(position=rank.position + 1))

    def settles(self, state: State, i: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if not any(open_ for _, open_ in rank.under_way):
            yield "comes to the end of its pass", self.moved(state, i, rank._replace(position=rank.position + 1))
        elif rank.failed or rank.cut:
            yield "finds that something has failed", self.call(state, i, rank)

    def begin(self, i: int, rank: Rank, kind: str) -> Rank:
        group = self.group(i, rank)
        open_ = lookup(rank.under_way, group, ())
        ahead = sum(one != CONSUMED for one in open_)
        number = 0 if kind == CONSUMED else lookup(rank.finished, group, 0) + ahead + 1
        return self.on_its_way(rank, group, number)._replace(under_way=put(rank.under_way, group, (*open_, kind)))

    @staticmethod
    def on_its_way(rank: Rank, group: str, number: int) -> Rank:
        begun = (*lookup(rank.begun, group, ()), (rank.attempt, number))
        return rank._replace(begun=put(rank.begun, group, begun))

    @staticmethod
    def met(state: State, rank: Rank, group: str, index: int) -> bool:
        """Whether every member has begun what this rank's collective of that index meets."""
        return all(
            state.ranks[j].generation == rank.generation and len(lookup(state.ranks[j].begun, group, ())) >= index
            for j in GROUPS[group]
        )

    def ends(self, state: State, i: int, rank: Rank, group: str) -> bool:
        open_ = lookup(rank.under_way, group, ())
        index = len(lookup(rank.begun, group, ())) - len(open_) + 1
        alive = group not in rank.failed and not rank.cut
        return bool(open_) and index > 0 and alive and self.met(state, rank, group, index)

    @staticmethod
    def with_result(rank: Rank, group: str) -> Rank:
        """The oldest collective under way on a group has ended well."""
        open_ = lookup(rank.under_way, group, ())
        rank = rank._replace(under_way=put(rank.under_way, group, open_[1:]))
        if open_[0] == CONSUMED:
            return rank
        kept = 1 if open_[0] == CALLED else lookup(rank.kept, group, 0) + 1
        rank = rank._replace(
            finished=put(rank.finished, group, lookup(rank.finished, group, 0) + 1), kept=put(rank.kept, group, kept)
        )
        if open_[0] == CALLED and rank.at == WAITING:
            return rank._replace(at=GOING, position=rank.position + 1)
        return rank._replace(position=rank.position + 1) if open_[0] == CALLED else rank

    # -- the repair

    @staticmethod
    def is_whole(rank: Rank) -> bool:
        kinds = [kind for _, open_ in rank.under_way for kind in open_]
        passing = [kind for kind in kinds if kind != CALLED]
        return not passing or (not rank.cut and CONSUMED not in passing)

    def call(self, state: State, i: int, rank: Rank) -> State:
        """Go to the repair that has been called for, or call for one."""
        rank = rank._replace(whole=rank.whole and self.is_whole(rank))
        gentle = rank.whole and not rank.unwound
        if state.notice <= rank.target or (state.gentle and not gentle):
            state = state._replace(notice=max(state.notice, rank.target) + 1, gentle=gentle)
        changes = {"at": REPORT, "target": state.notice, "plan": (), "serving": False, "cut": rank.cut or not gentle}
        return self.moved(state, i, rank._replace(**changes))

    @staticmethod
    def answer(i: int, rank: Rank) -> tuple:
        names = sorted({name for name, _ in (*rank.finished, *rank.under_way)})
        groups = tuple(
            (
                name,
                lookup(rank.finished, name, 0),
                sum(kind != CONSUMED for kind in lookup(rank.under_way, name, ())),
                lookup(rank.kept, name, 0),
            )
            for name in names
        )
        return rank.position == len(PROGRAM[i]), rank.whole and not rank.unwound, groups

    def repair(self, state: State, i: int, rank: Rank, called: bool) -> Iterator[tuple[str, State]]:
        if rank.at == RELEASE and state.released == rank.target:
            yield "goes on", self.moved(state, i, self.going_on(i, rank))
        elif called:
            yield "starts the repair again", self.call(state, i, rank)
        elif rank.at == REPORT:
            # Nobody moves on before all have rebuilt, so all decide on the same reports
            if all(other.target == rank.target and other.at in (REPORT, SERVE) for other in state.ranks):
                yield "rebuilds", self.moved(state, i, self.rebuilt(state, i, rank))
        elif rank.at == SERVE and all(other.target == rank.target and other.at != REPORT for other in state.ranks):
            yield from self.serves(state, i, rank)

    def rebuilt(self, state: State, i: int, rank: Rank) -> Rank:
        decision = decided(rank.target, tuple(self.answer(j, other) for j, other in enumerate(state.ranks)))
        left = tuple((name, tuple(kind for kind in open_ if kind != CONSUMED)) for name, open_ in rank.under_way)
        verb = decision.verbs[i].value
        return rank._replace(
            at=SERVE, generation=rank.target, begun=(), cut=False, failed=(), under_way=left, plan=self.plan(i, decision),
            verb=verb, spoilt=verb == Action.RETRY.value and left != rank.under_way,
        )  # fmt: skip

    @staticmethod
    def plan(i: int, decision: Decision) -> tuple[tuple[str, int], ...]:
        """What a rank serves, in order."""
        return tuple(
            (group, number) for group, doubt in decision.serve.items() if i in GROUPS[group] for number in doubt
        )

    def serves(self, state: State, i: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if not rank.plan:
            yield "has served", self.moved(state, i, self.set_out_again(rank)._replace(at=RELEASE))
            return
        (group, number), rest = rank.plan[0], rank.plan[1:]
        if not rank.serving:
            yield f"begins {group} {number} again", self.moved(
                state, i, self.on_its_way(rank, group, number)._replace(serving=True)
            )
        elif self.met(state, rank, group, len(lookup(rank.begun, group, ()))) and group not in rank.failed:
            late = number > lookup(rank.finished, group, 0)
            done = self.with_result(rank, group) if late else rank
            yield f"is done with {group} {number}", self.moved(state, i, done._replace(serving=False, plan=rest))

    def set_out_again(self, rank: Rank) -> Rank:
        """What nobody has finished is put on its way once more; not what the host waits for, which it does itself."""
        if rank.verb != Action.RETRY.value:
            return rank
        for group, open_ in rank.under_way:
            first = lookup(rank.finished, group, 0) + 1
            for number in range(first, first + open_.count(DEFERRED)):
                rank = self.on_its_way(rank, group, number)
        return rank

    def going_on(self, i: int, rank: Rank) -> Rank:
        if rank.verb == Action.REDO.value:
            return Rank(generation=rank.generation, target=rank.target, begun=rank.begun, attempt=rank.attempt + 1)
        rank = rank._replace(whole=True, at=GOING)
        waits = next((name for name, open_ in rank.under_way if CALLED in open_), None)
        if waits is not None:
            number = lookup(rank.finished, waits, 0) + 1
            return self.on_its_way(rank, waits, number)._replace(at=WAITING)
        return rank._replace(at=END) if rank.position == len(PROGRAM[i]) else rank

    # -- faults

    def strikes(self, state: State, i: int, rank: Rank) -> Iterator[tuple[str, State]]:
        if not state.faults:
            return
        struck = state._replace(faults=state.faults - 1)
        if rank.at in (GOING, WAITING):
            for group, open_ in rank.under_way:
                if open_ and group not in rank.failed:
                    yield f"loses {group}", self.moved(struck, i, rank._replace(failed=(*rank.failed, group)))
        if rank.at == SERVE and rank.serving:
            yield "fails as it serves", self.call(struck, i, rank._replace(target=max(rank.target, state.notice)))
        if self.unwinding and self.goes_on(i, rank):
            yield "is unwound", self.call(struck, i, rank._replace(unwound=True))

    # -- promises

    def broken(self, state: State) -> str:
        """Which promise a state breaks; empty if none."""
        for i, rank in enumerate(state.ranks):
            if rank.spoilt:
                return f"nothing spoilt: rank {i} goes on after a collective whose result it has consumed was aborted"
            for group, number in rank.finished:
                if number > count(i, group):
                    return f"once each: rank {i} has {number} results on {group}"
        for group, (i, j) in GROUPS.items():
            one, other = state.ranks[i], state.ranks[j]
            pairs = zip(lookup(one.begun, group, ()), lookup(other.begun, group, ()), strict=False)
            if one.generation == other.generation and not all(a == b for a, b in pairs):
                return f"the same one: ranks {i} and {j} have met in different collectives of {group}"
        return ""

    @staticmethod
    def unfinished(state: State) -> str:
        """What is wrong with a state in which nothing happens any more; empty if nothing is."""
        if any(rank.at != END for rank in state.ranks):
            return f"an end: ranks wait for ever at {[rank.at for rank in state.ranks]}"
        if any(dict(rank.finished).get(group, 0) != count(i, group) for i, rank in enumerate(state.ranks) for group in GROUPS):
            return "each: a rank has ended without all its results"
        return "" if len({rank.attempt for rank in state.ranks}) == 1 else "one attempt: ranks end in different ones"

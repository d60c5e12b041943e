"""An explicit-state model of the boundary protocol; docs/protocol.md says what is modelled. Explored by explorer.py.

A state holds every rank's position and the control plane's durable registers. One event is one atomic store operation
or one visible local step, so the events of different ranks interleave in every order. The decision inside a repair is
the product's own :func:`~lightning_accelpact.recovery.action.decide`, not a model of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from lightning_accelpact.recovery.action import Action, Decision, Phase, RankReport, decide

# A rank's phase is held as the plain value of `Phase`: hashing a string is several times cheaper than an enum member
FORWARD, BACKWARD, PREPARED, STEPPING, COMMITTED = (
    phase.value for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.PREPARED, Phase.STEPPING, Phase.COMMITTED)
)

# Places inside an update. FORWARD, BACKWARD, STEPPING and COMMITTED name the phase that the rank stands in.
CAST = "cast"  # gradients complete (or nothing left to do: the closing vote), own vote not yet in the store
COMMIT = "commit"  # has counted as many votes as ranks, about to write "commit"
WAIT = "wait"  # waits for the vote's register
OBEY = "obey"  # has met a fault after its vote, about to write "fault" into the vote's register and to obey it
# Places inside a repair
REPORT = "report"  # about to write its report
AGREE = "agree"  # waits for all reports
REBUILD = "rebuild"  # has decided; rebuilds and validates the communicators
GO = "go"  # has counted as many validated ranks as ranks, about to write "go"
RELEASE = "release"  # waits for the release's register
ABANDON = "abandon"  # has met a fault after it validated, about to write "fault" into the register and to obey it
# Final places
ENDED = "ended"  # all updates applied, and the closing vote has passed
STOPPED = "stopped"  # fail-stop
LOST = "lost"  # killed
OVER = frozenset({ENDED, STOPPED, LOST})

# Every place where a rank waits for another one. A deadline may pass here and nowhere else.
WAITING = frozenset({BACKWARD, WAIT, AGREE, RELEASE})

MISSING = "missing"  # stands in the register of a report that was not given in time
STOP = 99  # what a monitor has heard once it has heard that all ranks must stop

Key = tuple[int, int]  # (generation, update)


class Rank(NamedTuple):
    """One rank, its keys in the store, and two ghost fields (``gradients``, ``applied``) that only the checks read."""

    at: str = COMMITTED
    phase: str = COMMITTED
    frontier: int = 0
    generation: int = 0  # of its communicators
    target: int = 0  # the repair it is in or was in last; above `generation` inside a repair
    heard: int = 0  # its monitor thread has read notice/1 ... notice/{heard}
    votes: tuple[Key, ...] = ()
    reports: tuple[tuple[int, str, int], ...] = ()  # (repair, phase or MISSING, frontier)
    validated: tuple[int, ...] = ()  # repairs
    gradients: tuple[Key, ...] = ()  # (attempt, update) of complete gradients; attempt: the communicators' generation
    applied: tuple[Key, ...] = ()  # the same for each applied update, in order


class State(NamedTuple):
    """Everything that the future depends on."""

    ranks: tuple[Rank, ...]
    notice: int = 0  # notice/1 ... notice/{notice} are set
    stop: bool = False
    votes: tuple[tuple[Key, str], ...] = ()
    releases: tuple[tuple[int, str], ...] = ()
    faults: int = 0  # faults still to come
    causes: int = 0  # faults and deadlines so far


class Event(NamedTuple):
    """A transition. ``kind`` is ``main``, ``monitor``, ``deadline`` or one of ``FAULTS``."""

    kind: str
    rank: int
    text: str
    state: State


FAULTS = ("exception", "loss", "torn", "retry")


def held(registers: tuple, key: object) -> str:
    """The value of a write-once register, empty if it was never written."""
    return next((value for name, value in registers if name == key), "")


def compare_set(registers: tuple, key: object, value: str) -> tuple[tuple, str]:
    """Write a write-once register if it is empty; the registers afterwards and the value that stands."""
    standing = held(registers, key)
    return (registers, standing) if standing else (tuple(sorted((*registers, (key, value)))), value)


def move(state: State, i: int, **changes: object) -> State:
    """The state after one rank's fields have changed."""
    ranks = state.ranks
    return State((*ranks[:i], ranks[i]._replace(**changes), *ranks[i + 1 :]), *state[1:])  # faster than _replace()


def over(state: State, i: int, at: str) -> State:
    return move(state, i, at=at, heard=0)


def joined(other: Rank, rank: Rank) -> bool:
    """Whether another rank has entered the backward of this rank's update on the same communicators."""
    if other.generation != rank.generation:
        return False
    here = other.frontier == rank.frontier and other.phase in (BACKWARD, PREPARED, STEPPING)
    return here or other.frontier > rank.frontier


@cache
def decide_reports(generation: int, reports: tuple[tuple[str, int], ...]) -> Decision:
    """The product's decision about ``(phase, frontier)`` of every rank."""
    return decide(
        [
            RankReport(rank=rank, generation=generation, frontier=frontier, phase=Phase(phase))
            for rank, (phase, frontier) in enumerate(reports)
        ]
    )


class Protocol:
    """The boundary protocol. Broken variants override single methods.

    Args:
        world: Number of ranks.
        updates: Number of updates after which the ranks cast their closing vote.
        faults: Number of faults that may happen, anywhere.
        kinds: Which of ``FAULTS`` may happen: an ``exception`` outside of the optimizer's writing, the ``loss`` of a
            rank, a ``torn`` step, a store operation that raises after it took effect and is tried again (``retry``).
        budget: Number of repairs after which a rank fail-stops.
    """

    def __init__(
        self, *, world: int = 3, updates: int = 2, faults: int = 2, kinds: tuple[str, ...] = FAULTS, budget: int = 2
    ) -> None:
        self.world, self.updates, self.faults, self.kinds, self.budget = world, updates, faults, kinds, budget
        self.decisions: Counter[tuple[str, ...]] = Counter()
        self._steps = {
            COMMITTED: self.begin,
            FORWARD: self.forward,
            BACKWARD: self.backward,
            CAST: self.cast,
            COMMIT: self.commit,
            WAIT: self.wait,
            OBEY: self.obey,
            STEPPING: self.step,
            REPORT: self.report,
            AGREE: self.agree,
            REBUILD: self.rebuild,
            GO: self.go,
            RELEASE: self.release,
            ABANDON: self.abandon,
        }

    def initial(self) -> State:
        return State(ranks=(Rank(),) * self.world, faults=self.faults)

    def events(self, state: State) -> list[Event]:
        """All transitions of a state. A deadline passes only where no rank's main thread can do anything."""
        live = [i for i, rank in enumerate(state.ranks) if rank.at not in OVER]
        events = [event for i in live for event in self._steps[state.ranks[i].at](state, i)]
        if not events:
            events = [self.deadline(state, i) for i in live if state.ranks[i].at in WAITING]
        events += [event for i in live for event in self.monitor(state, i)]
        if state.faults:
            events += [event for i in live for event in self.fault(state, i)]
        return events

    # An update

    def begin(self, state: State, i: int) -> Iterator[Event]:
        rank = state.ranks[i]
        if rank.heard > rank.target:
            yield Event("main", i, f"obeys the notice before update {rank.frontier}", self.enter(state, i))
        elif rank.frontier == self.updates:
            yield Event("main", i, "has nothing left to do", move(state, i, at=CAST))
        else:
            yield Event("main", i, f"begins update {rank.frontier}", move(state, i, at=FORWARD, phase=FORWARD))

    def forward(self, state: State, i: int) -> Iterator[Event]:
        yield from self.interruption(state, i)
        yield Event("main", i, "begins its backward", move(state, i, at=BACKWARD, phase=BACKWARD))

    def backward(self, state: State, i: int) -> Iterator[Event]:
        yield from self.interruption(state, i)
        rank = state.ranks[i]
        if all(joined(other, rank) for other in state.ranks):
            done = {"at": CAST, "phase": PREPARED, "gradients": ((rank.generation, rank.frontier),)}
            yield Event("main", i, "completes its gradients", move(state, i, **done))

    def interruption(self, state: State, i: int) -> Iterator[Event]:
        """Peers shut their sockets when they enter a repair, stop or die; this rank's collective then fails."""
        rank = state.ranks[i]
        gone = any(peer.at in (LOST, STOPPED) for peer in state.ranks)
        if gone or rank.heard > rank.target or state.notice > rank.target:
            yield Event("main", i, f"is interrupted in {rank.phase}", self.enter(state, i))

    def vote_key(self, rank: Rank) -> Key:
        return (rank.generation, rank.frontier)

    def cast(self, state: State, i: int) -> Iterator[Event]:
        rank = state.ranks[i]
        if rank.heard > rank.target:
            # A vote that raised may be in the store all the same: only the register knows
            yield Event("main", i, "sees the notice before its vote", move(state, i, at=OBEY))
            return
        voted = self.voted(state, i)
        full = self.counted(voted, self.vote_key(rank)) >= self.world
        yield Event("main", i, "votes" + ", the last one" * full, move(voted, i, at=COMMIT if full else WAIT))

    def voted(self, state: State, i: int) -> State:
        """The store after this rank's vote, which has a key of its own: to vote twice is to vote once."""
        rank = state.ranks[i]
        return move(state, i, votes=tuple(sorted({*rank.votes, self.vote_key(rank)})))

    def counted(self, state: State, key: Key) -> int:
        return sum(rank.votes.count(key) for rank in state.ranks)

    def commit(self, state: State, i: int) -> Iterator[Event]:
        yield Event("main", i, *self.obeyed(state, i, "commit"))

    def wait(self, state: State, i: int) -> Iterator[Event]:
        if held(state.votes, self.vote_key(state.ranks[i])):
            yield Event("main", i, *self.obeyed(state, i, "fault"))

    def obey(self, state: State, i: int) -> Iterator[Event]:
        yield Event("main", i, *self.obeyed(state, i, "fault"))

    def obeyed(self, state: State, i: int, wish: str) -> tuple[str, State]:
        """Write a wish into the vote's register unless it has a value, and do what stands in it."""
        rank = state.ranks[i]
        votes, verdict = compare_set(state.votes, self.vote_key(rank), wish)
        state = state._replace(votes=votes)
        closing = rank.frontier == self.updates
        text = f"obeys the {'closing vote' if closing else f'vote on update {rank.frontier}'}: {verdict}"
        if verdict != "commit":
            return text, self.enter(state, i)
        return text, over(state, i, ENDED) if closing else move(state, i, at=STEPPING, phase=STEPPING)

    def step(self, state: State, i: int) -> Iterator[Event]:
        rank = state.ranks[i]
        # Without gradients the ghost record of what was applied gets a hole, which `unsafe` finds
        applied = (*rank.applied, *(rank.gradients or ((-1, -1),)))
        done = {"frontier": rank.frontier + 1, "applied": applied, "gradients": ()}
        yield Event("main", i, f"applies update {rank.frontier}", move(state, i, at=COMMITTED, phase=COMMITTED, **done))

    # A repair

    def enter(self, state: State, i: int) -> State:
        """Call the next repair, or join the newest one heard of; fail-stop on order or where the budget ends."""
        rank = state.ranks[i]
        target = max(rank.target + 1, rank.heard)
        if target > self.budget:  # STOP is above every budget
            return over(state._replace(stop=True), i, STOPPED)
        state = state._replace(notice=max(state.notice, target))
        return move(state, i, at=REPORT, target=target, heard=target)

    def report_key(self, rank: Rank) -> int:
        return rank.target

    def report(self, state: State, i: int) -> Iterator[Event]:
        rank = state.ranks[i]
        if rank.heard > rank.target:
            yield Event("main", i, "sees a newer notice before its report", self.withdrawn(state, i))
        else:
            yield Event("main", i, f"reports for repair {rank.target}", self.reported(state, i, at=AGREE))

    def reported(self, state: State, i: int, *, at: str) -> State:
        rank, key = state.ranks[i], self.report_key(state.ranks[i])
        own = () if key in [n for n, _, _ in rank.reports] else ((key, rank.phase, rank.frontier),)
        return move(state, i, at=at, reports=rank.reports + own)

    def withdrawn(self, state: State, i: int) -> State:
        """Leave an exchange of reports. If the own report may be in the store, the registers have the last word."""
        given = self.report_key(state.ranks[i]) in [n for n, _, _ in state.ranks[i].reports]
        return move(self.unanswered(state, i), i, at=AGREE) if given else self.enter(state, i)

    def unanswered(self, state: State, i: int) -> State:
        """End this rank's exchange of reports for everybody: what was not given by now is missing."""
        key = self.report_key(state.ranks[i])
        for j, rank in enumerate(state.ranks):
            if key not in [n for n, _, _ in rank.reports]:
                state = move(state, j, reports=tuple(sorted((*rank.reports, (key, MISSING, 0)))))
        return state

    def answers(self, state: State, i: int) -> tuple[tuple[str, int], ...]:
        """The reports of this rank's repair that have been written."""
        key = self.report_key(state.ranks[i])
        return tuple([(phase, frontier) for rank in state.ranks for n, phase, frontier in rank.reports if n == key])

    def decide(self, generation: int, reports: tuple[tuple[str, int], ...]) -> Decision:
        return decide_reports(generation, reports)

    def agree(self, state: State, i: int) -> Iterator[Event]:
        answers = self.answers(state, i)
        if len(answers) < self.world:
            return
        if (MISSING, 0) in answers:
            yield Event("main", i, "finds a report missing", self.enter(state, i))
            return
        decision = self.decide(state.ranks[i].target, answers)
        verbs = [verb.value for verb in decision.verbs]
        self.decisions[tuple(sorted(verbs))] += 1
        restart = decision.action is Action.RESTART
        yield Event("main", i, f"decides {verbs}", over(state, i, STOPPED) if restart else move(state, i, at=REBUILD))

    def rebuild(self, state: State, i: int) -> Iterator[Event]:
        rank = state.ranks[i]
        if rank.heard > rank.target or state.notice > rank.target or state.stop:
            yield Event("main", i, "is interrupted in its rebuild", move(state, i, at=ABANDON))
        if rank.heard > rank.target:
            return
        done = self.validated(state, i)
        full = all(rank.target in other.validated for other in done.ranks)
        text = f"has validated repair {rank.target}" + ", the last one" * full
        yield Event("main", i, text, move(done, i, at=GO if full else RELEASE))

    def validated(self, state: State, i: int) -> State:
        rank = state.ranks[i]
        return move(state, i, validated=tuple(sorted({*rank.validated, rank.target})))

    def go(self, state: State, i: int) -> Iterator[Event]:
        yield Event("main", i, *self.released(state, i, "go"))

    def release(self, state: State, i: int) -> Iterator[Event]:
        if held(state.releases, state.ranks[i].target):
            yield Event("main", i, *self.released(state, i, "fault"))

    def abandon(self, state: State, i: int) -> Iterator[Event]:
        yield Event("main", i, *self.released(state, i, "fault"))

    def released(self, state: State, i: int, wish: str) -> tuple[str, State]:
        """Write a wish into the release's register unless it has a value, and do what stands in it."""
        rank = state.ranks[i]
        releases, verdict = compare_set(state.releases, rank.target, wish)
        state = state._replace(releases=releases)
        text = f"obeys the release of repair {rank.target}: {verdict}"
        return text, self.resume(state, i) if verdict == "go" else self.enter(state, i)

    def resume(self, state: State, i: int) -> State:
        """Carry out this rank's own verb of a repair that succeeded."""
        verb = self.decide(state.ranks[i].target, self.answers(state, i)).verbs[i]
        state = move(state, i, generation=state.ranks[i].target)
        if verb is Action.PRESERVE:
            return move(state, i, at=COMMITTED)
        if verb is Action.ROLL_FORWARD:
            return move(state, i, at=STEPPING, phase=STEPPING)
        return move(state, i, at=FORWARD, phase=FORWARD, gradients=())

    # What happens to a rank

    def monitor(self, state: State, i: int) -> Iterator[Event]:
        """The monitor thread reads the next notice, or the stop, and ends what the main thread waits for."""
        rank = state.ranks[i]
        if rank.heard < state.notice:
            heard = move(state, i, heard=rank.heard + 1)
            yield Event("monitor", i, f"hears notice {rank.heard + 1}", self.woken(heard, i))
        if state.stop and rank.heard != STOP:
            yield Event("monitor", i, "hears the stop", self.woken(move(state, i, heard=STOP), i))

    def woken(self, state: State, i: int) -> State:
        rank = state.ranks[i]
        if rank.at in (COMMIT, WAIT):
            return state._replace(votes=compare_set(state.votes, self.vote_key(rank), "fault")[0])
        if rank.at in (GO, RELEASE):
            return state._replace(releases=compare_set(state.releases, rank.target, "fault")[0])
        return self.unanswered(state, i) if rank.at == AGREE else state

    def deadline(self, state: State, i: int) -> Event:
        after = state._replace(causes=state.causes + 1)
        after = self.enter(after, i) if state.ranks[i].at == BACKWARD else self.woken(after, i)
        return Event("deadline", i, f"gives up waiting in {state.ranks[i].at}", after)

    def fault(self, state: State, i: int) -> Iterator[Event]:
        rank = state.ranks[i]
        hit = state._replace(faults=state.faults - 1, causes=state.causes + 1)
        if "loss" in self.kinds:
            yield Event("loss", i, f"is lost in {rank.at}", over(hit, i, LOST))
        if "torn" in self.kinds and rank.at == STEPPING:
            yield Event("torn", i, f"fails while writing update {rank.frontier}", self.enter(hit, i))
        if "exception" in self.kinds and rank.at not in (STEPPING, OBEY, ABANDON):
            yield Event("exception", i, f"fails in {rank.at}", self.failed(hit, i))
        if "retry" in self.kinds:
            yield from self.retry(hit, i)

    def failed(self, state: State, i: int) -> State:
        """An error outside of the optimizer's writing. After a vote or a validation the register has the last word."""
        rank = state.ranks[i]
        if rank.at in (REPORT, AGREE):
            return self.withdrawn(state, i)
        if rank.at not in (CAST, COMMIT, WAIT, REBUILD, GO, RELEASE):
            return self.enter(state, i)
        called = max(rank.target + 1, rank.heard)
        state = state._replace(notice=max(state.notice, min(called, self.budget)))
        return move(state, i, at=OBEY if rank.at in (CAST, COMMIT, WAIT) else ABANDON, heard=called)

    def retry(self, state: State, i: int) -> Iterator[Event]:
        """A store operation that raised after it had taken effect: the rank stands where it stood."""
        rank = state.ranks[i]
        if rank.at == CAST:
            yield Event("retry", i, "has its vote stored but not confirmed", self.voted(state, i))
        elif rank.at == REPORT:
            yield Event("retry", i, "has its report stored but not confirmed", self.reported(state, i, at=REPORT))
        elif rank.at == REBUILD:
            yield Event("retry", i, "has its validation stored but not confirmed", self.validated(state, i))
        elif rank.at in (COMMIT, OBEY):
            votes, _ = compare_set(state.votes, self.vote_key(rank), "commit" if rank.at == COMMIT else "fault")
            yield Event("retry", i, "has its wish stored but not confirmed", state._replace(votes=votes))
        elif rank.at in (GO, ABANDON):
            releases, _ = compare_set(state.releases, rank.target, "go" if rank.at == GO else "fault")
            yield Event("retry", i, "has its wish stored but not confirmed", state._replace(releases=releases))

    # What must hold

    def unsafe(self, state: State) -> str:
        """Which promise a state breaks; empty if none."""
        for i, rank in enumerate(state.ranks):
            for update, step in enumerate(rank.applied):
                if step[1] != update:
                    return f"exactly once: rank {i} applied {step} as update {update}"
                for j, other in enumerate(state.ranks):
                    if step not in (other.applied[update : update + 1] + other.gradients):
                        what = f"update {update} (attempt {step[0]})"
                        return f"prepared: rank {i} applied {what}, rank {j} had not prepared it"
            if len(rank.applied) != rank.frontier:
                return f"exactly once: rank {i} is at {rank.frontier} after {len(rank.applied)} steps"
        if state.notice > state.causes:
            return f"cause: {state.notice} repairs were called by {state.causes} faults and deadlines"
        return ""

    def stuck(self, state: State, events: list[Event]) -> str:
        """Whether only deadlines can help although no rank was lost; empty if not."""
        if any(event.kind in ("main", "monitor") for event in events) or any(r.at == LOST for r in state.ranks):
            return ""
        return f"no idle wait: only a deadline can help, the ranks are at {[rank.at for rank in state.ranks]}"

    def unfinished(self, state: State) -> str:
        """What is wrong with a state in which nothing but a fault can happen; empty if nothing is."""
        places = [rank.at for rank in state.ranks]
        if not OVER.issuperset(places):
            return f"no deadlock: nothing can happen, the ranks are at {places}"
        if {ENDED, STOPPED} <= set(places):
            return f"one end: {places}"
        torn = any(rank.phase == STEPPING for rank in state.ranks)
        if STOPPED in places and LOST not in places and not torn and state.causes <= self.budget:
            return f"recovery: {places} after {state.causes} faults and deadlines, within a budget of {self.budget}"
        return ""

    # Making equal what cannot be told apart

    def canonical(self, state: State) -> State:
        """Sort the ranks, which are interchangeable, and forget what no rank will read again."""
        live = [rank for rank in state.ranks if rank.at not in OVER]
        repair = min([max(rank.target, rank.generation + 1) for rank in live], default=self.budget + 1)
        settled = min([rank.frontier for rank in state.ranks])
        ranks = sorted([self.trimmed(rank, live, repair, settled) for rank in state.ranks])
        votes = state.votes and tuple([item for item in state.votes if self.read(item[0], live)])
        releases = state.releases and tuple([item for item in state.releases if item[0] >= repair])
        causes = min(state.causes, self.budget + 1)  # no check tells more of them apart
        return State(tuple(ranks), state.notice, state.stop, votes, releases, state.faults, causes)

    def trimmed(self, rank: Rank, live: list[Rank], repair: int, settled: int) -> Rank:
        changes: dict[str, object] = {}
        if rank.votes and not all(self.read(key, live) for key in rank.votes):
            changes["votes"] = tuple([key for key in rank.votes if self.read(key, live)])
        if rank.reports and rank.reports[0][0] < repair:
            changes["reports"] = tuple([report for report in rank.reports if report[0] >= repair])
        if rank.validated and rank.validated[0] < repair:
            changes["validated"] = tuple([n for n in rank.validated if n >= repair])
        if any(attempt for attempt, _ in rank.applied[:settled]):
            # Everybody applied these with the same attempt (`unsafe` saw to it): which one it was no longer matters
            changes["applied"] = tuple([(0, update) for update in range(settled)]) + rank.applied[settled:]
        return rank._replace(**changes) if changes else rank

    def read(self, key: Key, live: list[Rank]) -> bool:
        """Whether a live rank may still look at a vote."""
        for rank in live:
            if key[0] >= rank.generation and key[1] >= rank.frontier:
                return True
        return False

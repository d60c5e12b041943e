"""Visits every reachable state of a protocol and shows the shortest way to a broken promise."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from recovery.protocol import Event, Protocol, State


@dataclass
class Exploration:
    """What an exploration saw.

    Args:
        states: Number of distinct states (up to renaming of ranks).
        events: Number of transitions.
        kinds: How often each kind of event was taken.
        ends: How often each multiset of final places was reached, as distinct states.
        violation: The promise that was broken and how; empty if none.
        trace: The shortest way to the violation, one line an event.
    """

    states: int = 0
    events: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    ends: Counter[tuple[str, ...]] = field(default_factory=Counter)
    violation: str = ""
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.states} states, {self.events} events {dict(self.kinds)}, ends {dict(self.ends)}"]
        return "\n".join(lines + ([self.violation, *self.trace] if self.violation else []))


def explore(protocol: Protocol, *, limit: int = 2_000_000) -> Exploration:
    """Visit every reachable state breadth first, up to the first violation.

    Raises:
        RuntimeError: if there are more than ``limit`` states, so that a bound is never mistaken for a proof.
    """
    seen = Exploration()
    first = protocol.canonical(protocol.initial())
    numbers, states, parents = {first: 0}, [first], array("l", [-1])
    later: list[array[int]] = []
    while len(later) < len(states) and not seen.violation:
        state = states[len(later)]
        events = protocol.events(state)
        seen.violation = _broken(protocol, state, events)
        if not _goes_on(events):
            seen.ends[tuple(sorted(rank.at for rank in state.ranks))] += 1
        following = array("l")
        for event in events:
            after = protocol.canonical(event.state)
            number = numbers.setdefault(after, len(states))
            if number == len(states):
                states.append(after)
                parents.append(len(later))
            following.append(number)
            seen.kinds[event.kind] += 1
        later.append(following)
        if len(states) > limit:
            raise RuntimeError(f"more than {limit} states: raise the limit or explore a smaller configuration")
    seen.states, seen.events = len(states), sum(seen.kinds.values())
    if seen.violation:
        seen.trace, state = _replay(protocol, states, parents, len(later) - 1)
        seen.violation = _broken(protocol, state, protocol.events(state))  # with the trace's numbers of the ranks
    elif not _acyclic(later):
        seen.violation = "no livelock: some states can follow each other for ever"
    return seen


def _goes_on(events: list[Event]) -> bool:
    """Whether anything but a fault can happen."""
    return any(event.kind in ("main", "monitor", "deadline") for event in events)


def _broken(protocol: Protocol, state: State, events: list[Event]) -> str:
    """Which promise a state breaks, and how; empty if none."""
    alive = protocol.stuck(state, events) if _goes_on(events) else protocol.unfinished(state)
    return protocol.unsafe(state) or alive


def _acyclic(later: list[array[int]]) -> bool:
    """Whether every path ends: all states can be taken away one by one, each after all that lead to it."""
    before = array("l", [0]) * len(later)
    for following in later:
        for number in following:
            before[number] += 1
    ready, taken = [number for number, count in enumerate(before) if not count], 0
    while ready:
        taken += 1
        for number in later[ready.pop()]:
            before[number] -= 1
            if not before[number]:
                ready.append(number)
    return taken == len(later)


def _replay(protocol: Protocol, states: list[State], parents: array[int], last: int) -> tuple[list[str], State]:
    """The events that lead to a state, one line each, and the state without renaming: each rank keeps its number."""
    path = []
    while last > 0:
        path.append(states[last])
        last = parents[last]
    lines, state = [], protocol.initial()
    for goal in reversed(path):
        event = next(e for e in protocol.events(state) if protocol.canonical(e.state) == goal)
        lines.append(f"{len(lines) + 1:3} [{event.kind}] rank {event.rank} {event.text}")
        state = event.state
    return lines, state

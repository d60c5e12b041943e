"""Collectives that are run again in place: a repair underneath the pass that waits for them, which never notices.

A collective is a pure function of inputs that are still in memory. Per group its members count the same collectives, so
after a fault their counts differ by one at most: nobody finishes one before all have begun it. Those that have finished
the newest one *serve* it again, from a kept input, to those that have not. A kept input is dropped once the next
collective of the group has finished, which proves that everybody has finished the one before.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from lightning_accelpact.recovery.action import GroupReport
from lightning_accelpact.recovery.c10d import Collective, current_by_name
from lightning_accelpact.recovery.contents import overwrite
from lightning_accelpact.recovery.kept import Kept, Shelf, Watched


class Repairs(Protocol):
    """Whoever repairs, the repair machine."""

    @property
    def collectives_count(self) -> bool:
        """Whether a collective now may run again in place: not one of a repair, nor of an operation with its own vote."""

    @property
    def passing(self) -> bool:
        """Whether a forward or backward pass of an update is being run."""

    @property
    def reducing(self) -> bool:
        """Whether it is a backward pass."""

    @property
    def pending(self) -> bool:
        """Whether a peer has asked for a repair."""

    def join(self) -> None:
        """Take part in a repair that a peer has asked for, unless a pass may go on before."""

    def drill(self) -> None:
        """A collective begins: an injected fault may strike in it."""

    def recovers(self, error: BaseException) -> bool:
        """Whether an error is a communication fault."""

    def recover_in_place(self, error: BaseException) -> None:
        """Repair; raises what unwinds the pass if it cannot go on."""


@dataclass
class Member:
    """This rank in one group: how many collectives it has finished, and the last ones that it could run again."""

    shelf: Shelf
    finished: int = 0
    kept: list[Kept] = field(default_factory=list)

    @property
    def sound(self) -> int:
        """How many of the last finished ones could run again."""
        return sum(1 for _ in takewhile(lambda kept: kept.sound, reversed(self.kept)))


class Flight:
    """A collective that this rank has begun."""

    __slots__ = ("collective", "finished", "kept", "member", "result")

    def __init__(self, collective: Collective, kept: Kept, member: Member) -> None:
        self.collective = collective
        self.kept = kept
        self.member = member
        self.finished = False
        self.result: Any = None

    def restore(self) -> None:
        """Bring inputs that a failed attempt may have overwritten back."""
        if self.collective.in_place:
            for tensor, content in zip(self.collective.inputs, self.kept.inputs, strict=True):
                overwrite(tensor, content)


class Retry:
    """Runs the collectives of one rank's training, again if a fault strikes in them.

    For backends whose collectives are finished when their call returns; others: :mod:`.streams`. Memory: for each group
    two copies of its largest input, and the input of the last reduce-scatter of a backward pass. That one is large, and
    the wrapper's own, so it is kept as it is; elsewhere users may write to it in ways that torch does not count.

    Args:
        repairs: Repairs the communicators.
    """

    def __init__(self, repairs: Repairs) -> None:
        self._repairs = repairs
        self._members: dict[str, Member] = {}
        self._flight: Flight | None = None
        self.begun = 0  # collectives of passes
        self._thread = threading.get_ident()

    def run(self, collective: Collective) -> Any:
        """In the place of a collective: returns what it returns, or raises what unwinds the pass.

        Raises:
            UpdateAborted: if a fault could only be repaired by running the update again.
            FailStop: if it could not be repaired.
        """
        if not (collective.waited and self._is_ours(collective)):
            return collective.plain()
        self._repairs.join()
        member = self._member(collective)
        flight = self._flight = Flight(collective, self._keep(collective, member), member)
        try:
            while not flight.finished:
                self._attempt(flight)
            return flight.result
        finally:
            self._flight = None

    def _is_ours(self, collective: Collective) -> bool:
        here = threading.get_ident() == self._thread
        return here and self._repairs.collectives_count and collective.registered and collective.dense

    def _attempt(self, flight: Flight) -> None:
        try:
            self._repairs.drill()
            self._fly(flight)
            return
        except RuntimeError as error:
            if not self._repairs.recovers(error):
                raise
            failure = error
        self._repairs.recover_in_place(failure)  # may have finished the flight, with those that had been faster
        if not flight.finished:
            flight.restore()

    def _fly(self, flight: Flight) -> None:
        flight.result = self._run(flight.collective)
        flight.finished = True
        flight.kept.seal()
        member = flight.member
        member.finished += 1
        member.kept = [flight.kept]

    def _run(self, collective: Collective) -> Any:
        """Run it to its end."""
        return collective.run()

    def _member(self, collective: Collective) -> Member:
        group = collective.group.group_name
        member = self._members.get(group)
        if member is None:
            member = self._members[group] = Member(Shelf())
        return member

    def _keep(self, collective: Collective, member: Member) -> Kept:
        inputs = collective.inputs
        if not inputs:
            return Kept(collective, inputs)
        if collective.bulky and self._repairs.reducing and not any(tensor.is_inference() for tensor in inputs):
            return Watched(collective, [tensor.detach() for tensor in inputs])
        return Kept(collective, member.shelf.copy(inputs, member.finished % 2))

    # -- called in a repair

    def report(self) -> dict[str, GroupReport]:
        """How far this rank has come in each of its groups."""
        flying = self._flight.collective.group.group_name if self.flying else None
        return {
            name: GroupReport(finished=member.finished, pending=int(name == flying), kept=member.sound)
            for name, member in self._members.items()
        }

    @property
    def flying(self) -> bool:
        """Whether this rank is inside a collective."""
        return self._flight is not None and not self._flight.finished

    def serve(self, doubt: dict[str, range]) -> None:
        """Run collectives again that not all members have finished.

        Args:
            doubt: Their numbers for each group, in the same order on all ranks; groups of other ranks are passed over.
        """
        for name, numbers in doubt.items():
            if name in self._members:
                for number in numbers:
                    self._serve(name, self._members[name], number)

    def _serve(self, name: str, member: Member, number: int) -> None:
        if number <= member.finished:
            member.kept[number - 1 - member.finished].serve(current_by_name(name))
        else:
            self._catch_up(name, member)

    def _catch_up(self, name: str, member: Member) -> None:
        """Finish the first collective of a group that this rank has begun and not finished."""
        self._flight.restore()
        self._fly(self._flight)

    @property
    def whole(self) -> bool:
        """Whether everything is there that the pass has got so far, so that it can go on."""
        return True

    @property
    def gentle(self) -> bool:
        """Whether peers may go on to the end of their passes, before they take part in a repair."""
        return False

    @property
    def reduced(self) -> bool:
        """Whether the all-reduces of the current update have begun."""
        return True

    def settle(self) -> None:
        """A pass is over: return once its collectives have their results. Here each has, when it returns."""

    def committed(self) -> None:
        """All ranks have voted on the update."""

    def repaired(self) -> None:
        """A repair is over, on all ranks."""

    def forget(self) -> None:
        """The update runs again from its start on every rank: count anew."""
        for member in self._members.values():
            member.finished, member.kept = 0, []

    @property
    def nbytes(self) -> int:
        """Bytes that hold copies."""
        return sum(member.shelf.nbytes for member in self._members.values())

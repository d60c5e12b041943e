"""Retries on backends whose collectives run on device streams, such as NCCL: the host is ahead of what has happened.

In a forward or backward pass the device consumes the results of all-gathers and reduce-scatters before the host knows
whether they are any good, so those cannot be run again: a fault in one of them is a REDO. The replication all-reduces of
a backward pass are different: their results are the gradients, which nobody reads before the pass is over. Each is
*deferred*: its input is kept, and the host looks at its result when the pass is over. Everywhere else, as in clipping, in
validation and between updates, the host waits for each collective, and it is retried as on any other backend.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from lightning_accelpact.recovery import c10d
from lightning_accelpact.recovery.action import GroupReport
from lightning_accelpact.recovery.c10d import FINISHED, Collective, Finished
from lightning_accelpact.recovery.communicator import CommunicatorLost, Started, StreamLinks
from lightning_accelpact.recovery.retry import Flight, Kept, Member, Repairs, Retry

_LOOK_S = 0.0002


class Deferred(Flight):
    """An all-reduce whose result is looked at when the pass is over."""

    def __init__(self, collective: Collective, kept: Kept, member: Member) -> None:
        super().__init__(collective, kept, member)
        self._started: Started | None = None
        self._versions = self._written()
        self.failure: RuntimeError | None = None

    def begin(self, links: StreamLinks) -> None:
        """Put it on its way."""
        self.failure = self._started = None
        try:
            self._started = links.begin(self.collective)
        except RuntimeError as error:
            self.failure = error  # told when the pass is over
        self._versions = self._written()

    def _written(self) -> list[int]:
        return [output._version for output in self.collective.outputs]

    @property
    def succeeded(self) -> bool:
        """Whether the result is there."""
        if self._started is None or not self._started.is_completed():
            return False
        if not self._started.is_success():
            self.failure = self.failure or CommunicatorLost("an all-reduce of the backward pass failed")
        return self.failure is None

    @property
    def untouched(self) -> bool:
        """Whether nobody has written to the result."""
        return self._versions == self._written()


class StreamRetry(Retry):
    """Runs the collectives of one rank's training on a backend with streams, again where that can be done.

    Memory: a copy of every gradient shard, for the update under way, and what :class:`Retry` needs.

    Args:
        repairs: Repairs the communicators.
        links: The transport.
        unread: Whether some results, of which the first ones are in doubt, are gradients that nobody has read.
        timeout: How long a collective may take.
    """

    def __init__(
        self,
        repairs: Repairs,
        *,
        links: StreamLinks,
        unread: Callable[[list[torch.Tensor], list[torch.Tensor]], bool],
        timeout: timedelta,
    ) -> None:
        super().__init__(repairs)
        self._links = links
        self._unread = unread
        self._timeout = timeout.total_seconds()
        self._deferred: dict[str, list[Deferred]] = {}  # not finished yet, oldest first
        self._results: list[torch.Tensor] = []
        self._others: deque[Callable[[], bool]] = deque()
        self._counts: dict[Any, int] = {}
        self._strangers = False  # somebody has issued a collective that this did not see
        self._broken = False

    def run(self, collective: Collective) -> Any:
        if not (self._repairs.passing and self._is_ours(collective)):
            return super().run(collective)
        self._repairs.join()
        self.begun += 1
        with self._counted(collective):
            if collective.waited and collective.in_place and self._repairs.reducing:
                return self._defer(collective)
            return self._pass_on(collective)

    @contextmanager
    def _counted(self, collective: Collective) -> Iterator[None]:
        group = c10d.current(collective.group)
        self._strangers |= self._counts.get(group, c10d.issued(group)) != c10d.issued(group)
        yield
        self._counts[group] = c10d.issued(group)

    def _defer(self, collective: Collective) -> Finished:
        member = self._member(collective)
        # The first two places of the shelf are for those that are waited for
        copies = member.shelf.copy(collective.inputs, 2 + len(self._results))
        flight = Deferred(collective, Kept(collective, copies), member)
        self._results += collective.outputs
        self._deferred.setdefault(collective.group.group_name, []).append(flight)
        try:
            self._repairs.drill()
        except RuntimeError as error:
            flight.failure = error
        else:
            flight.begin(self._links)
        return FINISHED

    def _pass_on(self, collective: Collective) -> Any:
        try:
            self._repairs.drill()
            result = collective.run()  # on the group of now: a repair may just have replaced the one it was called on
        except RuntimeError as error:
            if not self._repairs.recovers(error):
                raise
            self._broken = True
            self._repairs.recover_in_place(error)
            raise  # not come to: nobody goes on without what a pass consumes
        self._others.append(self._links.mark() if collective.waited else result.is_completed)
        while self._others and self._others[0]():
            self._others.popleft()
        return result

    def _run(self, collective: Collective) -> Any:
        result = super()._run(collective)
        self._links.settle()
        return result

    # -- when a pass is over

    def settle(self) -> None:
        """Return once every deferred all-reduce has its result on this rank.

        Raises:
            UpdateAborted: if a fault could only be repaired by running the update again.
            FailStop: if it could not be repaired.
        """
        self._strangers |= any(c10d.issued(group) != count for group, count in self._counts.items())
        self._counts.clear()
        while self._waiting:
            self._repairs.join()
            try:
                self._await()
            except RuntimeError as error:
                if not self._repairs.recovers(error):
                    raise
                self._repairs.recover_in_place(error)

    @property
    def _waiting(self) -> list[Deferred]:
        return [flight for flights in self._deferred.values() for flight in flights]

    def _await(self) -> None:
        """Wait for the results, or until a peer asks for a repair."""
        until = time.monotonic() + self._timeout
        while self._waiting and not self._repairs.pending:
            self._take_in()
            for flight in self._waiting:
                if flight.failure is not None:
                    raise flight.failure
            self._links.check()
            if time.monotonic() > until:
                raise CommunicatorLost(f"an all-reduce has not finished within {self._timeout:g} s")
            time.sleep(_LOOK_S)
        if not self._waiting:
            self._links.settle()
            self._others.clear()
            self._strangers = False

    def _take_in(self) -> None:
        """Count those that have their results, in order."""
        for flights in self._deferred.values():
            while flights and flights[0].succeeded:
                self._finish(flights.pop(0))

    @staticmethod
    def _finish(flight: Deferred) -> None:
        flight.kept.seal()
        flight.member.kept.append(flight.kept)
        flight.member.finished += 1

    # -- called in a repair

    @property
    def whole(self) -> bool:
        self._broken |= not self._is_whole()  # for good: in the next try of a repair an aborted kernel looks like any other
        return not self._broken

    def _is_whole(self) -> bool:
        doubtful = self._waiting
        if not (doubtful or self._others or self._strangers):
            return True
        if self._links.down or self._strangers or not all(ended() for ended in self._others):
            return False
        outputs = [output for flight in doubtful for output in flight.collective.outputs]
        return all(flight.untouched for flight in doubtful) and (not outputs or self._unread(outputs, self._results))

    @property
    def gentle(self) -> bool:
        return self.whole

    @property
    def reduced(self) -> bool:
        return bool(self._results)

    def report(self) -> dict[str, GroupReport]:
        self._take_in()
        reports = super().report()
        for name, flights in self._deferred.items():
            reports[name] = replace(reports[name], pending=reports[name].pending + len(flights))
        return reports

    def serve(self, doubt: dict[str, range]) -> None:
        for flight in self._waiting:
            flight.restore()
        super().serve(doubt)
        self._links.settle()
        for flight in self._waiting:  # nobody has finished these
            flight.begin(self._links)

    def repaired(self) -> None:
        self._broken = False

    def _catch_up(self, name: str, member: Member) -> None:
        if not self._deferred.get(name):
            super()._catch_up(name, member)
            return
        flight = self._deferred[name].pop(0)
        flight.collective.run()
        self._finish(flight)

    def committed(self) -> None:
        """All ranks have voted, so all have finished: nothing has to be served any more."""
        for member in self._members.values():
            member.kept = member.kept[-1:]
        self._results.clear()
        self._others.clear()
        self._strangers = False

    def forget(self) -> None:
        super().forget()
        self._deferred.clear()
        self._results.clear()
        self._others.clear()
        self._strangers = False

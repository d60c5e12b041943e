"""The control plane: a store that never shares a socket with training traffic, and one monitor thread per rank.

Everything that ranks agree on is a *register*: a key that is written once, by whoever comes first, and whose value
then stands for all (``compare_set`` on the store). A wait for a register is ended by its deadline or by the monitor,
both of which write "no" into it and obey what stands. So no rank can wait for ever, and no two ranks can read
different answers.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_accelpact.recovery.endpoint import Endpoint
from lightning_accelpact.recovery.line import ControlLost, Line, Unanswered

_YES, _NO = "yes", "no"
_FOREVER = timedelta(days=365)


class Superseded(RuntimeError):
    """A newer fault overtook what was being agreed."""


@dataclass(frozen=True, kw_only=True)
class Notice:
    """A message to every rank that a repair begins, or that the run ends.

    Args:
        generation: The repair it calls for.
        rank: Who says so.
        reason: What happened there.
        time: Wall clock (Unix time) at which the sender observed it.
        stop: Whether every rank must fail-stop instead of repairing.
        update: The update whose passes go on to their end before they take part, since the sender has cut no links; -1
            for none.
    """

    generation: int
    rank: int
    reason: str
    time: float
    stop: bool = False
    update: int = -1


class ControlPlane:
    """Agreement, notices and small gathers for one rank.

    Args:
        endpoint: Where the store is.
        rank: Global rank of this process.
        world_size: Number of ranks.
        deadline: How long a rank waits for its peers, at the most, before it vetoes what it waits for.
    """

    def __init__(self, *, endpoint: Endpoint, rank: int, world_size: int, deadline: timedelta) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.world_size = world_size
        self.deadline = deadline
        self._server = endpoint.serve()
        self.store = Line(endpoint, deadline)

    # -- registers

    def settle(self, key: str, value: str, *, store: Line | None = None) -> str:
        """Write a register unless it has a value; returns the value that stands."""
        return self._call(lambda: (store or self.store).compare_set(key, "", value)).decode()

    def read(self, key: str, *, otherwise: str, deadline: timedelta | None = None) -> str:
        """Wait for a register; if the deadline passes first, settle it with ``otherwise``."""
        try:
            self.store.wait([key], deadline or self.deadline)
        except dist.DistStoreError:
            return self.settle(key, otherwise)
        return self._call(lambda: self.store.get(key)).decode()

    def peek(self, key: str) -> str | None:
        """A register's value, or ``None`` if it has none yet; does not wait."""
        if not self._call(lambda: self.store.check([key])):
            return None
        return self._call(lambda: self.store.get(key)).decode()

    def cast(self, ballot: str, *, expired: str | None = None) -> None:
        """Cast this rank's "yes"; the last rank to do so settles the ballot.

        Args:
            ballot: Name of the ballot.
            expired: A ballot that no rank can still be waiting for; the first rank to vote removes it, so that a run of
                weeks does not fill the store.
        """
        try:
            count = self._call(lambda: self.store.add(f"{ballot}/count", 1))
        except Unanswered:
            self.veto(ballot)  # whether it was counted or not: the repair costs less than a wrong count
            return
        if count == self.world_size:
            self.settle(ballot, _YES)
        elif count == 1 and expired is not None:
            self._call(lambda: (self.store.delete_key(f"{expired}/count"), self.store.delete_key(expired)))

    def tally(self, ballot: str) -> bool:
        """Wait until the ballot is settled: true if every rank voted, false if anyone vetoed first."""
        return self.read(ballot, otherwise=_NO) == _YES

    def veto(self, ballot: str, *, store: Line | None = None) -> bool:
        """Settle a ballot with "no" unless it is settled; true if it has passed all the same."""
        return self.settle(ballot, _NO, store=store) == _YES

    def exchange(
        self, topic: str, message: dict[str, Any], *, deadline: timedelta | None = None
    ) -> list[dict[str, Any]]:
        """Give a message to every rank and take theirs; all ranks get the same list, in rank order.

        Raises:
            Superseded: if a rank did not answer, or a newer notice came first.
        """
        self.settle(f"{topic}/{self.rank}", json.dumps(message))
        keys = [f"{topic}/{peer}" for peer in range(self.world_size)]
        try:
            self.store.wait(keys, deadline or self.deadline)
        except dist.DistStoreError:
            self.abandon(topic)
        answers = [answer.decode() for answer in self._call(lambda: self.store.multi_get(keys))]
        silent = [rank for rank, answer in enumerate(answers) if answer == _NO]
        if silent:
            raise Superseded(f"ranks {silent} did not answer in {topic}")
        return [json.loads(answer) for answer in answers]

    def abandon(self, topic: str, *, store: Line | None = None) -> None:
        """End an exchange for everybody: answers not given by now are settled as missing."""
        for peer in range(self.world_size):
            self.settle(f"{topic}/{peer}", _NO, store=store)

    # -- notices

    def notify(self, notice: Notice) -> None:
        """Give a notice to every rank. The first one of a generation stands; a stop goes on to one that is free."""
        while not self._post(notice) and notice.stop:
            notice = replace(notice, generation=notice.generation + 1)

    def _post(self, notice: Notice) -> bool:
        """Settle the generation's notice and wake every monitor; true if it is the one that stands."""
        text = json.dumps(asdict(notice))
        standing = self.settle(_notice_key(notice.generation), text)
        keys = [_wake_key(notice.generation, peer) for peer in range(self.world_size)]
        self._call(lambda: self.store.multi_set(keys, [""] * len(keys)))
        return standing == text

    def notify_self(self, generation: int) -> None:
        """Wake this rank's own monitor."""
        self._call(lambda: self.store.set(_wake_key(generation, self.rank), ""))

    def close(self, patience: timedelta) -> None:
        """Leave in good order; the rank that serves the store waits for the others, so that none loses it early.

        Args:
            patience: How long it waits at the most. Whoever comes later finds no store, and has nothing to leave.
        """
        with suppress(dist.DistError, ControlLost, Unanswered):
            self.store.add("closed", 1)
            limit = time.monotonic() + patience.total_seconds()
            while self._server is not None and self.store.add("closed", 0) < self.world_size:
                if time.monotonic() > limit:
                    break
                time.sleep(0.01)
        self._server = None

    @staticmethod
    def _call(operation: Callable[[], Any]) -> Any:
        try:
            return operation()
        except dist.DistError as error:
            raise ControlLost(f"the control store does not answer: {error}") from error


def _notice_key(generation: int) -> str:
    return f"notice/{generation}"


def _wake_key(generation: int, rank: int) -> str:
    return f"wake/{generation}/{rank}"


class Monitor:
    """The thread that waits for notices while the main thread computes or is blocked in a collective.

    Args:
        control: The control plane; the monitor opens a connection of its own.
        on_notice: Called in the monitor thread with each notice and the monitor's own store.
        on_lost: Called there with the reason when the control store is lost.
    """

    def __init__(
        self,
        control: ControlPlane,
        on_notice: Callable[[Notice, Line], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._control = control
        self._on_notice = on_notice
        self._on_lost = on_lost
        self._store = Line(control.endpoint, control.deadline)
        self._closing = False
        self.latest: Notice | None = None
        self._thread = threading.Thread(target=self._run, name="accelpact-monitor", daemon=True)
        self._thread.start()

    @property
    def noticed(self) -> int:
        """The highest generation that a notice has called for."""
        return self.latest.generation if self.latest else 0

    def close(self) -> None:
        """End the thread: a notice to oneself wakes it."""
        self._closing = True
        with suppress(ControlLost):  # then the thread has ended by itself
            self._control.notify_self(self.noticed + 1)
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._closing:
            generation = self.noticed + 1
            try:
                self._store.wait([_wake_key(generation, self._control.rank)], _FOREVER)
                if self._closing:
                    return
                self.latest = Notice(**json.loads(self._store.get(_notice_key(generation)).decode()))
                self._on_notice(self.latest, self._store)
            except (dist.DistError, ControlLost) as error:
                if not self._closing:
                    self._on_lost(str(error))
                return

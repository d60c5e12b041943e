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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_accelpact.recovery import secret
from lightning_accelpact.recovery.endpoint import LOOK_AGAIN_S, Endpoint
from lightning_accelpact.recovery.line import ControlLost, Line, Unanswered
from lightning_accelpact.recovery.secret import Message

_YES, _NO = "yes", "no"
_FOREVER = timedelta(days=365)
_SHORTEST_SLICE_S, _LONGEST_SLICE_S = 1.0, 60.0  # of a wait, after which a rank looks at the votes itself
_GREETING_S = 2.0  # for a greeting that somebody else has written over
_MONITOR_END_S = 1.0
_OVERWRITTEN = 100  # times that a register is written again


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
    """Agreement, notices and small gathers for one rank. What does not bear the run's seal counts as not written.

    Args:
        endpoint: Where the store is.
        rank: Global rank of this process.
        world_size: Number of ranks.
        deadline: How long a rank waits for its peers, at the most, before it vetoes what it waits for.

    Raises:
        ControlLost: in every method, if the store does not answer any more.
    """

    def __init__(self, *, endpoint: Endpoint, rank: int, world_size: int, deadline: timedelta) -> None:
        self.endpoint = endpoint
        self.rank = rank
        self.world_size = world_size
        self.deadline = deadline
        self._seal = endpoint.seal(rank)
        self._given: list[str] = []  # answers in exchanges
        self._ballot = ""  # the last one that this rank has voted in
        self._settled = ("", "")  # the last one that it has settled, and how
        self._server = endpoint.serve()
        self.store = Line(endpoint, deadline)

    @property
    def rejected(self) -> int:
        """How often this rank has found something that nobody with the run's secret has written."""
        return self._seal.rejected

    def greet(self) -> None:
        """Meet all ranks at the start.

        Raises:
            RuntimeError: if one of them has another secret, or has not come when the deadline has passed.
        """
        keys = [f"hello/{peer}" for peer in range(self.world_size)]
        self.settle(keys[self.rank], "hello")
        try:
            self.store.wait(keys, self.deadline)
        except dist.DistStoreError as error:
            missing = [peer for peer, key in enumerate(keys) if not self.store.check([key])]
            raise RuntimeError(
                f"ranks {missing} of {self.world_size} have not come to the start within"
                f" collective_timeout={self.deadline.total_seconds():g} s: look whether they were launched, and whether"
                f" they reach rank 0's {self.endpoint.host}:{self.endpoint.port}"
            ) from error
        limit = time.monotonic() + _GREETING_S
        while strangers := [rank for rank, key in enumerate(keys) if self._found(key) is None]:
            if time.monotonic() > limit:
                raise RuntimeError(
                    f"ranks {strangers} do not have the secret of rank {self.rank}: hand the same {secret.VARIABLE} or"
                    f" {secret.FILE_VARIABLE} to all ranks of a run"
                )
            self.settle(keys[self.rank], "hello")  # somebody may have deleted it
            time.sleep(LOOK_AGAIN_S)

    # -- registers

    def settle(self, key: str, value: str, *, store: Line | None = None) -> str:
        """Write a register unless it has a value; returns the value that stands.

        Raises:
            ControlLost: if somebody else writes to it without end.
        """
        sealed, standing = self._seal.close(key, value).encode(), b""
        for _ in range(_OVERWRITTEN):
            with _answered():
                found = (store or self.store).compare_set(key, standing, sealed)
            message = self._seal.open(key, found)
            if message is not None:
                return message.text
            # Somebody else's: put ours in its place, unless it has gone, when the store says what we expected
            standing = b"" if found == standing else found
        raise ControlLost(f"somebody without this run's secret keeps writing to {key} in the control store")

    def publish(self, key: str, value: str) -> None:
        """Write what may change."""
        with _answered():
            self.store.set(key, self._seal.close(key, value))

    def read(
        self,
        key: str,
        *,
        otherwise: str,
        deadline: timedelta | None = None,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> str:
        """Wait for a register; if the deadline passes first, settle it with ``otherwise``.

        Args:
            key: Name of the register.
            otherwise: What it says if nobody writes to it.
            deadline: How long to wait for it; ``None`` for the control plane's own.
            meanwhile: Called after a second, again after two more and so on, and when somebody else has written to it.
        """
        limit = time.monotonic() + (deadline or self.deadline).total_seconds()
        pause = _SHORTEST_SLICE_S
        while (left := limit - time.monotonic()) > 0:
            try:
                self.store.wait([key], timedelta(seconds=min(left, pause)))
            except dist.DistStoreError:
                pause = min(2 * pause, _LONGEST_SLICE_S)
            else:
                if (message := self._found(key)) is not None:
                    return message.text
                time.sleep(LOOK_AGAIN_S)
            meanwhile()
        return self.settle(key, otherwise)

    def peek(self, key: str, *, store: Line | None = None) -> str | None:
        """A register's value, or ``None`` if it has none yet; does not wait."""
        with _answered():
            there = (store or self.store).check([key])
        message = self._found(key, store) if there else None
        return message.text if message else None

    def _found(self, key: str, store: Line | None = None) -> Message | None:
        """What has been written under a key; unlike ``get`` this does not wait if it has been deleted."""
        with _answered():
            return self._seal.open(key, (store or self.store).compare_set(key, "", ""))

    def cast(self, ballot: str, *, expired: str | None = None) -> None:
        """Cast this rank's "yes"; the last rank to do so settles the ballot.

        Args:
            ballot: Name of the ballot.
            expired: A ballot that no rank can still be waiting for; the first rank to vote removes it, so that a run of
                weeks does not fill the store.
        """
        self._ballot = ballot
        self.publish(self._vote_key(self.rank), ballot)
        count = self._count(f"{ballot}/count")
        if count >= self.world_size:
            self._settle_if_complete(ballot)
        elif count == 1 and expired is not None:
            with _answered():
                self.store.delete_key(f"{expired}/count")
                self.store.delete_key(expired)

    def _count(self, key: str) -> int:
        """How many have counted themselves, or more if a connection broke; all of them if that cannot be found out."""
        for _ in range(2):
            with suppress(Unanswered), _answered():
                return self.store.add(key, 1)
        return self.world_size

    def _settle_if_complete(self, ballot: str) -> None:
        """Anybody can add to the count, so that it says only when to look at the votes."""
        keys = [self._vote_key(peer) for peer in range(self.world_size)]
        votes = self._all(keys)
        if votes is not None and all(vote == Message(rank, ballot) for rank, vote in enumerate(votes)):
            self._settled = (ballot, self.settle(ballot, _YES))

    @staticmethod
    def _vote_key(rank: int) -> str:
        return f"ballot/{rank}"

    def _all(self, keys: list[str]) -> list[Message | None] | None:
        """What has been written under each of these keys; ``None`` if one of them is not there."""
        with _answered():
            if not self.store.check(keys):
                return None
            return [self._seal.open(key, text) for key, text in zip(keys, self.store.multi_get(keys), strict=True)]

    def tally(self, ballot: str) -> bool:
        """Wait until the ballot is settled: true if every rank voted, false if anyone vetoed first."""

        def count_again() -> None:
            if self._ballot == ballot:
                self.publish(self._vote_key(self.rank), ballot)
                self._settle_if_complete(ballot)

        if self._settled[0] == ballot:  # the last one to vote need not ask
            return self._settled[1] == _YES
        return self.read(ballot, otherwise=_NO, meanwhile=count_again) == _YES

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
        answers = self._answers(topic, json.dumps(message), deadline or self.deadline)
        silent = [rank for rank, answer in enumerate(answers) if not _is_answer(rank, answer) or answer.text == _NO]
        if silent:
            raise Superseded(f"ranks {silent} did not answer in {topic}")
        self._forget_answers_before(f"{topic}/{self.rank}")
        return [json.loads(answer.text) for answer in answers]

    def _forget_answers_before(self, own: str) -> None:
        """Delete this rank's answers in earlier exchanges: whoever has answered in this one has left those."""
        with _answered():
            for key in self._given:
                if key != own:
                    self.store.delete_key(key)
        self._given = [own]

    def _answers(self, topic: str, own: str, deadline: timedelta) -> list[Message | None]:
        keys = [f"{topic}/{peer}" for peer in range(self.world_size)]
        limit = time.monotonic() + deadline.total_seconds()
        self.settle(keys[self.rank], own)
        self._given += [] if keys[self.rank] in self._given else [keys[self.rank]]
        known: dict[int, Message] = {}  # a genuine answer stays, whoever writes over it
        while (left := limit - time.monotonic()) > 0:
            with suppress(dist.DistStoreError):
                self.store.wait(keys, timedelta(seconds=left))
                self._take_answers(keys, known)
                if len(known) == self.world_size:
                    return [known[rank] for rank in range(self.world_size)]
                self.settle(keys[self.rank], own)
                time.sleep(LOOK_AGAIN_S)
        self.abandon(topic)
        self._take_answers(keys, known)
        return [known.get(rank) for rank in range(self.world_size)]

    def _take_answers(self, keys: list[str], known: dict[int, Message]) -> None:
        for rank, answer in enumerate(self._all(keys) or ()):
            if _is_answer(rank, answer):
                known.setdefault(rank, answer)

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
        with _answered():
            self.store.multi_set(keys, [""] * len(keys))
        return standing == text

    def notice(self, generation: int, *, store: Line) -> Notice | None:
        """The notice of a generation, if there is one."""
        text = self.peek(_notice_key(generation), store=store)
        return None if text is None else Notice(**json.loads(text))

    def notify_self(self, generation: int) -> None:
        """Wake this rank's own monitor."""
        with _answered():
            self.store.set(_wake_key(generation, self.rank), "")

    def say_closed(self) -> None:
        """Say that this rank needs the store no more."""
        self.publish(_closed_key(self.rank), "")

    def close(self, patience: timedelta) -> None:
        """Leave in good order; the rank that serves the store waits for the others, so that none loses it early.

        Args:
            patience: How long it waits at the most. Whoever comes later finds no store, and has nothing to leave.
        """
        with suppress(dist.DistError, ControlLost):
            self.say_closed()
            limit = time.monotonic() + patience.total_seconds()
            while self._server is not None and not self._all_have_left() and time.monotonic() < limit:
                time.sleep(LOOK_AGAIN_S)
        self._server = None

    def _all_have_left(self) -> bool:
        left = self._all([_closed_key(peer) for peer in range(self.world_size)])
        return left is not None and None not in left


def _is_answer(rank: int, answer: Message | None) -> bool:
    return answer is not None and (answer.sender == rank or answer.text == _NO)


@contextmanager
def _answered() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise ControlLost(f"the control store does not answer: {error}") from error


def _closed_key(rank: int) -> str:
    return f"closed/{rank}"


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
        self._thread.join(_MONITOR_END_S)

    def _run(self) -> None:
        while not self._closing:
            generation = self.noticed + 1
            try:
                self._store.wait([_wake_key(generation, self._control.rank)], _FOREVER)
                if self._closing:
                    return
                notice = self._control.notice(generation, store=self._store)
                if notice is None:  # somebody else has woken us
                    time.sleep(LOOK_AGAIN_S)
                    continue
                self.latest = notice
                self._on_notice(notice, self._store)
            except (dist.DistError, ControlLost) as error:
                if not self._closing:
                    self._on_lost(str(error))
                return

"""The coordinator: starts members, replaces those that are lost, and keeps the account of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.failbench import fork_server, registry
from benchmarks.failbench.cell import Cell
from benchmarks.failbench.mechanisms.plan import Report
from benchmarks.failbench.member import Seat, main
from benchmarks.failbench.messages import (
    Confirmed,
    Done,
    Failed,
    Form,
    Heard,
    Leave,
    Left,
    LostPeer,
    Proceed,
    Ready,
    Restored,
    Stop,
    Striking,
    Warn,
    Warned,
)
from benchmarks.failbench.preset import Preset
from benchmarks.failbench.record import InjectedFault
from benchmarks.failbench.timeline import Recovery, Timeline

_SETTLE_S = 0.05  # for faults that strike together to be seen together
_LOOK_S = 0.2  # between two looks at a deadline


class RunFailed(RuntimeError):
    """The run did not come to an end that was to be expected."""


@dataclass
class _Seated:
    """A member as the coordinator sees it.

    Args:
        process: Its process.
        connection: To it.
        ready: When it had started.
        struck: Whether a fault has struck it.
        silent: Whether its end of the connection is closed.
    """

    process: Any
    connection: Connection
    ready: float | None = None
    struck: bool = False
    silent: bool = False


@dataclass
class Coordinator:
    """Carries one run of a cell through, on a store of its own.

    It hears of a loss from survivors alone, never from the operating system: how soon they notice is what is measured.

    Args:
        cell: What is run.
        preset: Sizes.
        seed: Of everything random.
        faults: The schedule.
        offset_s: How far into their step faults strike, seconds.
        folder: On a disk that all members share.
    """

    cell: Cell
    preset: Preset
    seed: int
    faults: tuple[InjectedFault, ...]
    offset_s: float
    folder: Path
    timeline: Timeline = field(default_factory=Timeline)

    def __post_init__(self) -> None:
        self._architecture = registry.architecture(self.cell.architecture)
        self._mechanism = registry.mechanism(self.cell.mechanism)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._seats: dict[int, _Seated] = {}
        self._members: tuple[int, ...] = ()
        self._generation = -1
        self._left: dict[int, Left] = {}
        self._heard: set[int] = set()
        self._warned: set[int] = set()
        self._unconfirmed: set[int] = set()
        self._deadline = 0.0

    def run(self) -> Timeline:
        """Run to the last step, or to a halt.

        Raises:
            RunFailed: if a member fails otherwise than planned, or nothing comes of it in time.
        """
        self._deadline = time.monotonic() + self.preset.deadline_s
        try:
            self._start()
            while self._unfinished():
                self._look()
                if self._left and not self._recover():
                    break
            self.timeline.world_after = len(self.timeline.done or self._seats)
        finally:
            self._end()
        return self.timeline

    def _start(self) -> None:
        everybody = range(self.preset.ranks)
        self._spawn(everybody)
        self._await_ready(everybody)
        self._form(tuple(everybody), ())
        self.timeline.began = time.monotonic()

    def _unfinished(self) -> bool:
        """Whether anybody still trains; who hangs, and whose peers go on without it, does not."""
        training = [member for member in self._alive(self._members) if not self._seats[member].struck]
        return any(member not in self.timeline.done for member in training)

    def _spawn(self, members: Iterable[int]) -> None:
        for member in members:
            ours, theirs = fork_server.pipe()
            seat = Seat(
                member=member,
                cell=self.cell,
                preset=self.preset,
                seed=self.seed,
                faults=tuple(fault for fault in self.faults if fault.rank not in self.timeline.strikes),
                offset_s=self.offset_s,
                store_port=self._store.port,
                folder=self.folder,
            )
            self._seats[member] = _Seated(fork_server.start(main, seat, theirs), ours)
            theirs.close()

    def _await_ready(self, members: Iterable[int]) -> float:
        waiting = list(members)
        self._look_until(lambda: all(self._seats[member].ready for member in waiting), "not all processes started")
        return max(self._seats[member].ready or 0.0 for member in waiting)

    def _form(self, living: tuple[int, ...], reports: tuple[Report, ...]) -> None:
        """Tell all living members who trains from here on."""
        self._generation += 1
        usable = self._architecture.usable(len(living))
        chosen = living if usable == len(living) else _holders_first(living, reports)[:usable]
        self._members = chosen
        spares = tuple(member for member in living if member not in chosen)
        self.timeline.done.clear()
        self._tell(living, Form(self._generation, chosen, spares, reports))

    def _recover(self) -> bool:
        """See that all survivors leave, replace the lost, and let them form anew.

        Returns:
            False if the mechanism recovers nothing, and the run has halted.
        """
        self._tell(self._alive(self._seats), Leave(self._generation))
        self._await_survivors()
        lost = tuple(member for member in self._seats if member not in self._left)
        if not lost:
            raise RunFailed("members left although nobody is lost:\n" + _errors(self._left.values()))
        ends = {member: self._seats[member].process.exitcode for member in lost if not self._seats[member].struck}
        if 0 in ends or len(ends) == len(lost):  # others are recovered with those that were struck; 0 has the clock
            raise RunFailed(f"members were lost although no fault has struck them; their exit codes: {ends}")
        recovery = Recovery(lost, dict(self._left))
        self.timeline.recoveries.append(recovery)
        self._left = {}
        self._heard = set()
        for member in lost:
            self._bury(member)
        if not self._mechanism.recovers:
            return False
        self._replace(recovery)
        return True

    def _await_survivors(self) -> None:
        """Until all living members have left. Who does not answer hangs, and is killed.

        A member that answers may wait for a peer in the store, where only the groups' timeout ends its wait.
        """
        answer = time.monotonic() + self.preset.answer_s
        leave = answer + self.preset.detect_timeout_s
        while waiting := [member for member in self._alive(self._seats) if member not in self._left]:
            if time.monotonic() > (leave if self._heard.issuperset(waiting) else answer):
                break
            self._look()
        settled = time.monotonic() + _SETTLE_S
        while time.monotonic() < settled:
            self._look(_SETTLE_S)
        survivors = [member for member in self._alive(self._seats) if member in self._left]
        for member in [one for one in self._seats if one not in survivors]:
            self._seats[member].process.kill()
            self._drain(member)
            self._left.pop(member, None)  # it left, and was struck then

    def _replace(self, recovery: Recovery) -> None:
        if self._mechanism.respawns:
            recovery.spawned = time.monotonic()
            self._spawn(recovery.lost)
            recovery.ready = self._await_ready(recovery.lost)
        living = tuple(sorted(self._seats))
        reports = tuple(left.report for _, left in sorted(recovery.left.items()) if left.report is not None)
        recovery.formed_from = time.monotonic()
        self._form(living, reports)

    def _bury(self, member: int) -> None:
        seated = self._seats[member]
        seated.process.join(self.preset.answer_s)
        seated.connection.close()
        del self._seats[member]

    def _drain(self, member: int) -> None:
        """What a member had said before it was lost."""
        connection = self._seats[member].connection
        try:
            while connection.poll(0):
                self._hear(member, connection.recv())
        except (EOFError, OSError):
            return  # that was all

    def _look_until(self, done: Callable[[], bool], otherwise: str) -> None:
        while not done():
            if time.monotonic() > self._deadline:
                raise RunFailed(f"{otherwise} within {self.preset.deadline_s:g} s")
            self._look()

    def _look(self, patience: float = _LOOK_S) -> None:
        """Hear what members say.

        Raises:
            RunFailed: at the deadline.
        """
        if time.monotonic() > self._deadline:
            raise RunFailed(f"not over within {self.preset.deadline_s:g} s; done: {sorted(self.timeline.done)}")
        by_connection = {seated.connection: member for member, seated in self._seats.items() if not seated.silent}
        if not by_connection:
            raise RunFailed("no member is left")
        for connection in wait(list(by_connection), patience):
            member = by_connection[connection]  # type: ignore[index]
            try:
                message = connection.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                self._seats[member].silent = True
                self._seats[member].process.join(patience)
                continue
            self._hear(member, message)

    def _hear(self, member: int, message: Any) -> None:
        if isinstance(message, Ready):
            self._seats[member].ready = message.at
        elif isinstance(message, Striking):
            self.timeline.strikes[member] = message
            self._seats[member].struck = True
        elif isinstance(message, Left) and message.generation == self._generation:
            self._left[member] = message
        elif isinstance(message, Heard) and message.generation == self._generation:
            self._heard.add(member)
        elif isinstance(message, LostPeer):
            self.timeline.lost_peers.append(message)
        elif isinstance(message, Done):
            self.timeline.done[member] = message
        elif isinstance(message, Restored) and self.timeline.recoveries:
            self.timeline.recoveries[-1].restored[member] = message
        elif isinstance(message, Warned):
            self._pass_on_warning(member, message)
        elif isinstance(message, Confirmed):
            self._confirm(member)
        elif isinstance(message, Failed):
            raise RunFailed(f"member {member} failed:\n{message.error}")

    def _pass_on_warning(self, member: int, message: Warned) -> None:
        """Tell all, once all victims of this step have said that they are warned."""
        self._warned.add(member)
        victims = {fault.rank for fault in self.faults if fault.step == message.step and fault.warning_s}
        if victims <= self._warned:
            everybody = self._alive(self._seats)
            self._unconfirmed = set(everybody)
            self._tell(everybody, Warn(tuple(sorted(victims)), message.step + self._architecture.skew))

    def _confirm(self, member: int) -> None:
        self._unconfirmed.discard(member)
        if not self._unconfirmed:
            self._tell(self._warned, Proceed())
            self._warned = set()

    def _tell(self, members: Iterable[int], message: Any) -> None:
        for member in members:
            try:
                self._seats[member].connection.send(message)
            except OSError:
                continue  # it is lost; its peers will say so

    def _is_alive(self, member: int) -> bool:
        return member in self._seats and self._seats[member].process.exitcode is None

    def _alive(self, members: Iterable[int]) -> list[int]:
        return [member for member in members if self._is_alive(member)]

    def _end(self) -> None:
        """Leave no process behind."""
        self._tell(self._alive(self._seats), Stop())
        until = time.monotonic() + self.preset.answer_s
        for seated in self._seats.values():
            seated.process.join(max(0.0, until - time.monotonic()))
            seated.process.kill()
            seated.process.join()
            seated.connection.close()
        self._seats = {}


def _holders_first(living: tuple[int, ...], reports: tuple[Report, ...]) -> tuple[int, ...]:
    """One holder of each shard first, in the order of the shards; of several the most advanced."""
    known = {report.member: report for report in reports}
    holders: dict[str, Report] = {}
    for report in sorted(known.values(), key=lambda one: (-one.step, one.member)):
        holders.setdefault(report.shard, report)
    first = [holders[shard].member for shard in sorted(holders)]
    return (*first, *(member for member in living if member not in first))


def _errors(left: Iterable[Left]) -> str:
    return "\n".join(one.error for one in left if one.noticed)

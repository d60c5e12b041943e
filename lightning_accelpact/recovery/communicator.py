"""Communicators: interrupt, retire, rebuild and validate the process groups of one rank; one class per backend."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_accelpact.recovery import c10d, sockets, uncaught
from lightning_accelpact.recovery.c10d import GroupSpec
from lightning_accelpact.recovery.endpoint import LOOK_AGAIN_S
from lightning_accelpact.recovery.waiter import Waiter

log = logging.getLogger("accelpact")

_LOOK_S = 0.0002
_COMMUNICATION_ERROR = re.compile(
    r"gloo|nccl|connection|socket|broken pipe|timed out|communicator|process group", re.IGNORECASE
)
# What torch's and Gloo's own checks of a call say, with the same words in it
_WRONG_CALL = re.compile(r"Check failed: |invalid tensor |enforce fail at \S*/gloo/\w+\.cc")


class CommunicatorLost(RuntimeError):
    """A training communicator failed, or was taken down so that a blocked collective returns."""


def is_communication_error(error: BaseException) -> bool:
    """Whether an exception that came out of a collective says that communication failed.

    Gloo raises plain ``RuntimeError``, so its message has to decide. A call with tensors that do not fit is none.
    """
    if isinstance(error, (CommunicatorLost, dist.DistError)):
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and bool(_COMMUNICATION_ERROR.search(said)) and not _WRONG_CALL.search(said)


class Links(Protocol):
    """The transport below the process groups of one backend.

    Args:
        synchronous: Whether a collective has finished when its call returns, so that it can be run again there.
        connect_timeouts: How many times the timeout that it is given making a group may take.
    """

    synchronous: bool
    connect_timeouts: int

    def watch(self) -> None:
        """Called right before one or more groups are made."""

    def record(self, group: str) -> None:
        """Called right after ``group`` was made: what is new since the last call belongs to it."""

    def cut(self, groups: Iterable[str] | None = None) -> int:
        """Make every collective on the named groups (all if ``None``) fail at once, on both ends.

        Returns:
            How many links were still up.
        """

    def healthy(self) -> bool:
        """Whether nothing is known to be wrong."""

    def settle(self) -> None:
        """Return once every collective issued so far has succeeded.

        Raises:
            CommunicatorLost: if one has failed.
        """

    def forget(self) -> None:
        """Drop what is known of groups that are retired."""


class Started(Protocol):
    """A collective that is under way."""

    def is_completed(self) -> bool:
        """Whether it has ended."""

    def is_success(self) -> bool:
        """Whether it has ended well."""


class StreamLinks(Links, Protocol):
    """Links whose collectives go on after their call has returned."""

    @property
    def down(self) -> bool:
        """Whether all have been cut, and not been watched again since."""

    def begin(self, collective: c10d.Collective) -> Started:
        """Put a collective on its way, whose caller does not need its work."""

    def mark(self) -> Callable[[], bool]:
        """Tells whether what has been issued until now has ended."""

    def check(self) -> None:
        """Look for a fault.

        Raises:
            CommunicatorLost: if something is wrong.
        """

    def wake(self) -> None:
        """End what this rank waits for, with :class:`CommunicatorLost`, and leave the links as they are."""


class GlooLinks:
    """Gloo's connected TCP sockets.

    ``abort()`` and ``shutdown()`` of a Gloo group do not wake a collective that waits; shutting its connected sockets
    down does, within about a millisecond, on both ends. The listening sockets are left alone: closing one ends the
    process.

    Args:
        ignored_ports: Connections from or to these belong to somebody else.
        silence: Seconds after which a link fails whose other end does not answer.
    """

    synchronous = True
    connect_timeouts = 5  # a constant of Gloo's, seen with a link that is cut

    def __init__(self, ignored_ports: Iterable[int] = (), *, silence: float) -> None:
        self._silence = silence
        self._ignored_ports = frozenset(ignored_ports)
        self._sockets: dict[str, dict[int, str]] = {}
        self._seen: dict[int, str] = {}
        self._down = False
        c10d.make_waits_interruptible(lambda: self._down)
        uncaught.park_gloo_threads()

    def watch(self) -> None:
        self._down = False
        self._seen = sockets.open_sockets()

    def record(self, group: str) -> None:
        seen = sockets.open_sockets()
        fresh = {fd: inode for fd, inode in seen.items() if self._seen.get(fd) != inode}
        self._sockets[group] = {fd: inode for fd, inode in fresh.items() if self._is_link(fd)}
        self._seen = seen
        for fd in self._sockets[group]:
            sockets.limit_silence(fd, self._silence)

    def cut(self, groups: Iterable[str] | None = None) -> int:
        self._down = self._down or groups is None
        names = list(self._sockets) if groups is None else groups
        links = [link for name in names for link in self._sockets.get(name, {}).items()]
        return sum(sockets.shut(fd, inode) for fd, inode in links)

    def healthy(self) -> bool:
        links = [link for group in self._sockets.values() for link in group.items()]
        return all(sockets.is_established(fd, inode) for fd, inode in links)

    def settle(self) -> None:
        """Nothing to wait for: a Gloo collective has succeeded when its call returns."""

    def forget(self) -> None:
        self._sockets = {}

    def _is_link(self, fd: int) -> bool:
        local, remote = sockets.ports(fd)
        return remote != 0 and not self._ignored_ports & {local, remote}


class NcclLinks:
    """NCCL communicators, aborted together: aborting several one after the other is known to hang.

    torch's own watchdog must not end the process over an error that is about to be repaired, so its error handling is
    switched off; errors surface at :meth:`check` and :meth:`settle`.

    Args:
        timeout: How long a collective may take.
        deadline: How long an abort may take.
    """

    synchronous = False
    connect_timeouts = 1

    def __init__(self, *, timeout: timedelta, deadline: timedelta) -> None:
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        self._timeout = timeout
        self._deadline = deadline
        self._woken = False
        self.down = False

    def watch(self) -> None:
        self.down = self._woken = False

    def record(self, group: str) -> None:
        """Nothing to remember: torch knows its NCCL communicators."""

    def cut(self, groups: Iterable[str] | None = None) -> int:
        if self.down or not dist.is_initialized():
            return 0
        self.down = True
        worker = threading.Thread(target=c10d.abort_all, name="accelpact-abort", daemon=True)
        worker.start()
        worker.join(self._deadline.total_seconds())
        if worker.is_alive():
            raise CommunicatorLost(f"NCCL did not abort within {self._deadline.total_seconds():g} s")
        return 1

    def wake(self) -> None:
        self._woken = True

    def healthy(self) -> bool:
        return not self.down and not c10d.nccl_error()

    def check(self) -> None:
        if self.down:
            raise CommunicatorLost("the NCCL communicators were aborted")
        if error := c10d.nccl_error():
            raise CommunicatorLost(error)

    def settle(self) -> None:
        """Wait for the current stream, which waits for the others; a kernel whose peer is gone would never end."""
        ended, until = self.mark(), time.monotonic() + self._timeout.total_seconds()
        while not ended():
            self.check()
            if self._woken:
                raise CommunicatorLost("the wait was interrupted")
            if time.monotonic() > until:
                raise CommunicatorLost(f"NCCL has not finished within {self._timeout.total_seconds():g} s")
            time.sleep(_LOOK_S)
        self.check()

    def begin(self, collective: c10d.Collective) -> Started:
        work = collective.begin(c10d.current(collective.group), collective.outputs, collective.inputs)
        work.wait()  # the stream does, not the host
        return work

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()
        event.record()
        return event.query

    def forget(self) -> None:
        """Nothing to drop."""


class Communicators:
    """All process groups of this rank, replaced together in a repair.

    Not only the group that failed: whoever waits in another group for a rank that has left for the repair must be
    woken, and on Gloo that takes the group down. A generation number keeps a late interruption away from the
    replacements.

    Args:
        rank: Global rank of this process.
        make_store: Gives the store on which the groups of a generation meet. Must not share keys between generations:
            a group that is rebuilt under the same name would read the dead group's addresses.
        cut_store: Ends a wait on that store, from any thread.
        links: The transport below the groups.
        timeout: How long a collective may take.
        rebuild_timeout: How long making one replacement may take.
    """

    def __init__(
        self,
        *,
        rank: int,
        make_store: Callable[[int], dist.Store],
        cut_store: Callable[[], None],
        links: Links,
        timeout: timedelta,
        rebuild_timeout: timedelta,
    ) -> None:
        self._rank = rank
        self._make_store = make_store
        self._cut_store = cut_store
        self.timeout = timeout
        self._rebuild_timeout = rebuild_timeout
        self._lock = threading.Lock()
        self._specs: list[GroupSpec] = []
        self._complete = True
        # Whether a rebuild may wait on the store: it is cut only then, since a new connection costs DNS look-ups
        self._meeting = False
        self._store: dist.Store | None = None
        self.links = links
        self.generation = 0

    @contextmanager
    def adopt(self, name: str):
        """Context in which the run makes process groups for the first time."""
        self.links.watch()
        yield
        self.links.record(name)

    def create_world(self, backend: str, world_size: int) -> None:
        """Make the default group of generation 0."""
        spec = GroupSpec(name="0", ranks=tuple(range(world_size)), backend=backend, description="", is_world=True)
        with self.adopt("world"):
            c10d.create_group(spec, rank=self._rank, store=self._make_store(0), timeout=self.timeout)

    def interrupt(self, before: int) -> int:
        """Make every collective of a generation lower than ``before`` fail at once, from any thread.

        Returns:
            The number of links that were still up.
        """
        with self._lock:
            if self.generation >= before:
                return 0
            if self._meeting:
                self._cut_store()
            return self.links.cut()

    def try_interrupt(self, before: int) -> None:
        """:meth:`interrupt` where nothing could be done about its failure; that is logged."""
        try:
            self.interrupt(before)
        except CommunicatorLost as error:
            log.error("collectives of generations before %d may go on waiting: %s", before, error)

    def wake(self, before: int) -> None:
        """End what this rank waits for on a generation lower than ``before``, from any thread; the links stay."""
        with self._lock:
            if self.generation < before:
                self.links.wake()

    def retire(self, generation: int) -> list[dist.ProcessGroup]:
        """Take all groups out of service; from here on only a notice newer than ``generation`` interrupts.

        Args:
            generation: The repair that replaces them.

        Returns:
            The retired groups, still alive: references to them have to be found before they go.
        """
        with self._lock:
            if self._complete:  # else a repair was cut short and these are only some of them
                self._specs = list(c10d.registered_groups())
            self._complete = False
            self.links.cut()
            self.links.forget()
            self.generation = generation
            self._store = self._make_store(generation)
            self._meeting = True
            self.links.watch()
            return c10d.forget_groups()

    def rebuild(self) -> dict[str, dist.ProcessGroup]:
        """Make every retired group again, under its name and with its members.

        Returns:
            The replacements by name.

        Raises:
            CommunicatorLost: if a group cannot be made within the rebuild timeout.
        """
        try:
            groups = {spec.name: self._create(spec) for spec in self._specs}
        except RuntimeError as error:
            self._cut_store()  # the next try begins with a new connection
            raise CommunicatorLost(f"rebuilding generation {self.generation} failed: {error}") from error
        self._meeting = False
        self._complete = True
        return groups

    def _create(self, spec: GroupSpec) -> dist.ProcessGroup:
        connect = self._rebuild_timeout / self.links.connect_timeouts
        group = c10d.create_group(spec, rank=self._rank, store=self._store, timeout=connect)
        c10d.set_timeout(group, self._rebuild_timeout)  # for the validation
        self.links.record(self._label(spec))
        return group

    @staticmethod
    def _label(spec: GroupSpec) -> str:
        return "world" if spec.is_world else spec.description.removeprefix("mesh_")

    def validate(self) -> None:
        """Prove each group with an integer all-reduce (paper, phase 6), then give it its normal timeout.

        Raises:
            CommunicatorLost: if a sum is wrong.
        """
        for spec, group in c10d.registered_groups().items():
            total = torch.ones(1, dtype=torch.int64, device=c10d.device_of(group))
            dist.all_reduce(total, group=group)
            if total.item() != len(spec.ranks):
                raise CommunicatorLost(f"group {spec.name} summed {total.item()} over {len(spec.ranks)} ranks")
            c10d.set_timeout(group, self.timeout)


_disposals: set[threading.Thread] = set()
_left_alive: list[dist.ProcessGroup] = []
_exiting = threading.Event()


def dispose(groups: list[dist.ProcessGroup]) -> None:
    """Destroy retired groups in the background: their threads take some 15 ms each to end, without the GIL.

    A collective that was left behind may hold up the end for its whole timeout. So nobody else may drop the last
    reference: code that was inside a collective during the repair still holds the group that it was called on.
    """
    thread = threading.Thread(target=_dispose, args=(groups,), name="accelpact-dispose", daemon=True)
    _disposals.add(thread)
    thread.start()


def end_disposals(patience: float) -> None:
    """Before the interpreter exits: end these threads, since one that is in the middle of a destructor then aborts.

    Args:
        patience: Seconds to wait for each at the most.
    """
    _exiting.set()
    for thread in list(_disposals):
        thread.join(patience)
    _exiting.clear()


def await_endings(patience: float) -> None:
    """Return once no retired group holds files and threads any more; a wait that was given up does for its whole timeout.

    Args:
        patience: Seconds after which it returns in any case.
    """
    until = time.monotonic() + patience
    while (_disposals or Waiter.busy()) and time.monotonic() < until:
        time.sleep(LOOK_AGAIN_S)


def _never_destroy(groups: list[dist.ProcessGroup]) -> None:
    """One of these, or an earlier one, has a thread that was parked: its destructor would wait for that for ever."""
    for group in groups:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    groups.clear()


_LOOKS = 200  # at somebody else's reference, up to 0.5 s apart
_OURS = 3  # references to a group below: the list's, the variable's, and the argument's of getrefcount()


def _dispose(groups: list[dist.ProcessGroup]) -> None:
    if uncaught.parked_threads():
        _never_destroy(groups)
    for look in range(_LOOKS):
        held = [group for group in groups if sys.getrefcount(group) > _OURS]
        groups[:] = held  # the others end here
        if not held:
            break
        del held
        if _exiting.wait(min(0.5, 0.01 * 2**look)):
            _left_alive.extend(groups)
            break
    _disposals.discard(threading.current_thread())

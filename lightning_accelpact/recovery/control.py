"""The control plane: a store that never shares a socket with training traffic, and one monitor thread per rank.

Everything that ranks agree on is a *register*: a key that is written once, by whoever comes first, and whose value
then stands for all (``compare_set`` on the store). A wait for a register is ended by its deadline or by the monitor,
both of which write "no" into it and obey what stands. So no rank can wait for ever, and no two ranks can read
different answers.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from lightning_accelpact.recovery import sockets

_SIOCGIFADDR = 0x8915
_YES, _NO = "yes", "no"
_FOREVER = timedelta(days=365)


class ControlLost(RuntimeError):
    """The control store cannot be reached: nothing can be agreed any more."""


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


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the control store lives.

    Args:
        host: Address that every rank can reach.
        port: TCP port.
        hosted_here: Whether this process serves it. Under an elastic agent, which outlives every rank, no rank does.
        namespace: Prefix of all keys; differs between attempts of a relaunched job.
        kept: What must live as long as the endpoint.
        silence: Seconds after which a connection counts as broken whose other end does not answer.
    """

    host: str
    port: int
    hosted_here: bool
    namespace: str = "accelpact"
    kept: Any = None
    silence: float = 3.0

    @classmethod
    def from_environment(
        cls, *, host: str, port: int, rank: int, interface: str | None, deadline: timedelta
    ) -> Endpoint:
        """The store at the launcher's rendezvous address, or on a network interface of its own.

        Args:
            host: The launcher's rendezvous host.
            port: And its port; the elastic agent serves a store there where there is one, else rank 0 does.
            rank: Global rank of this process.
            interface: Interface of rank 0's node to serve the store on; ``None`` to stay at the rendezvous address.
            deadline: How long to wait for rank 0.
        """
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        meeting = cls(host=host, port=port, hosted_here=rank == 0 and not by_agent, namespace=f"accelpact/{attempt}")
        return meeting if interface is None else meeting._moved(interface, rank, deadline)

    def _moved(self, interface: str, rank: int, deadline: timedelta) -> Endpoint:
        """Rank 0 opens a store on the interface, and the others learn of it at the meeting point."""
        kept, store = self.serve(), self.connect(deadline)
        if rank == 0:
            with _listen(interface_address(interface), 0) as free:
                store.set("endpoint", json.dumps(free.getsockname()))
        host, port = json.loads(store.get("endpoint"))
        return replace(self, host=host, port=port, hosted_here=rank == 0, kept=(kept, store))

    def serve(self) -> dist.TCPStore | None:
        """Start the store if it is this process's to serve; it lives as long as the returned object."""
        if not self.hosted_here:
            return None
        listener = _listen(self.host, self.port)
        return dist.TCPStore(
            self.host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def connect(self, deadline: timedelta) -> dist.Store:
        """A connection of one's own: a client is locked while it waits, so every thread needs another.

        Raises:
            DistError: if nobody has answered when the deadline has passed.
        """
        client = dist.TCPStore(self.host, self.port, is_master=False, wait_for_workers=False, timeout=deadline)
        for fd in sockets.open_sockets():
            # Its file descriptor is not known, and for the other connections to this port it does no harm
            if sockets.ports(fd)[1] == self.port:
                sockets.limit_silence(fd, self.silence)
        return dist.PrefixStore(self.namespace, client)


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on the address of ``host`` alone, or on all if that address is not one of this machine's."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        listener.bind(("", port))  # behind address translation
    listener.listen(4096)
    return listener


def interface_address(name: str) -> str:
    """The IPv4 address of a network interface of this machine.

    Raises:
        ValueError: if there is no such interface or it has no address; names those that have one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            known = [interface for _, interface in socket.if_nameindex()]
            raise ValueError(
                f"control_interface={name!r} is not an interface with an IPv4 address on this machine;"
                f" its interfaces are {known}"
            ) from None
    return socket.inet_ntoa(answer[20:24])


class Unanswered(RuntimeError):
    """The connection broke before the answer came: nobody knows whether the operation took effect."""


_PATIENCE = timedelta(seconds=2)
_BREAKS = 10  # of the connection, in one operation


class Line:
    """A connection to the control store that is made again when it breaks, which torch's client does not do.

    Args:
        endpoint: Where the store is.
        deadline: How long an operation may take.

    Raises:
        ControlLost: in every method, if the store cannot be reached again within two seconds, or nobody listens there any
            more; and from then on at once.
    """

    _lost: ClassVar[dict[tuple[str, int], str]] = {}  # stores that this process has given up, with the reason

    def __init__(self, endpoint: Endpoint, deadline: timedelta) -> None:
        self._endpoint = endpoint
        self._deadline = deadline
        self._store = endpoint.connect(deadline)
        self._lost.pop(self._address, None)

    @property
    def _address(self) -> tuple[str, int]:
        return self._endpoint.host, self._endpoint.port

    def add(self, key: str, amount: int) -> int:
        """Add to a counter.

        Raises:
            Unanswered: if the connection broke: to try again could count twice.
        """
        try:
            return self._store.add(key, amount)
        except dist.DistNetworkError as error:
            self._connect_again(error)
            raise Unanswered(str(error)) from error

    def _repeat(self, name: str, *args: Any) -> Any:
        """An operation that does nothing new when it is done once more."""
        for _ in range(_BREAKS):
            try:
                return getattr(self._store, name)(*args)
            except dist.DistNetworkError as error:
                self._connect_again(error)
        raise ControlLost(f"the connection to the control store broke {_BREAKS} times during one operation")

    def _connect_again(self, error: BaseException) -> None:
        if self._address not in self._lost:
            try:
                # torch's client would go on trying although nobody listens, which means that the store has ended
                socket.create_connection(self._address, timeout=_PATIENCE.total_seconds()).close()
                self._store = self._endpoint.connect(_PATIENCE)
                self._store.set_timeout(self._deadline)
                return
            except (OSError, dist.DistError) as again:
                self._lost[self._address] = f"{error}; and to a new connection: {again}"
        raise ControlLost(f"the control store does not answer: {self._lost[self._address]}") from error


def _repeated(name: str) -> Callable[..., Any]:
    def method(self: Line, *args: Any) -> Any:
        return self._repeat(name, *args)

    method.__name__ = name
    method.__doc__ = f"``Store.{name}``, on a new connection if the old one breaks."
    return method


for _name in ("wait", "get", "set", "check", "compare_set", "delete_key", "multi_get", "multi_set"):
    setattr(Line, _name, _repeated(_name))


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


class InterruptibleStore:
    """A connection for making process groups, whose waits another thread can end.

    Args:
        endpoint: Where the store is.
        deadline: How long one wait may take.
    """

    def __init__(self, endpoint: Endpoint, deadline: timedelta) -> None:
        self._endpoint = endpoint
        self._deadline = deadline
        self._connection: dict[int, str] = {}
        self._store: Line | None = None

    def for_generation(self, generation: int) -> dist.Store:
        """The store on which the groups of one generation meet; connects again if it was interrupted."""
        store = self._store
        if store is None:
            before = sockets.open_sockets()
            store = self._endpoint.connect(self._deadline)
            self._connection = {
                fd: inode
                for fd, inode in sockets.open_sockets().items()
                # The serving rank also finds its peers' connections here: theirs end at the store's port
                if before.get(fd) != inode and sockets.ports(fd)[1] == self._endpoint.port
            }
            self._store = store
        return dist.PrefixStore(f"groups/{generation}", store)

    def cut(self) -> None:
        """End a wait on this store, from any thread."""
        connection, self._connection, self._store = self._connection, {}, None
        for fd, inode in connection.items():
            sockets.shut(fd, inode)


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

"""Destroys the TCP connections of other processes from outside, as a broken network does; needs root and iproute2's ss."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_USER = re.compile(r"pid=(\d+)")


@dataclass(frozen=True)
class Connection:
    """One end of an established connection.

    Args:
        local: ``address:port``.
        remote: ``address:port``.
        pids: Processes that hold it.
    """

    local: str
    remote: str
    pids: frozenset[int]

    @property
    def ports(self) -> set[int]:
        """Both ports."""
        return {int(end.rpartition(":")[2]) for end in (self.local, self.remote)}

    def destroy(self) -> bool:
        """Make the kernel reset it, at both ends; returns whether it was there."""
        (source, source_port), (target, target_port) = (end.rsplit(":", 1) for end in (self.local, self.remote))
        condition = ["src", source, "sport", "=", source_port, "dst", target, "dport", "=", target_port]
        return bool(_ss("-K", *condition).strip())


def connections(pids: Iterable[int], spared_ports: Iterable[int] = ()) -> list[Connection]:
    """The established connections of some processes.

    Args:
        pids: The processes.
        spared_ports: Connections from or to these are left out.
    """
    wanted, spared = set(pids), set(spared_ports)
    found = (_parsed(line) for line in _ss("-tnpHO", "state", "established").splitlines())
    return [one for one in found if one.pids & wanted and not one.ports & spared]


def _parsed(line: str) -> Connection:
    local, remote = line.split()[2:4]
    return Connection(local, remote, frozenset(int(pid) for pid in _USER.findall(line)))


def _ss(*arguments: str) -> str:
    return subprocess.run(["ss", *arguments], check=True, capture_output=True, text=True, timeout=10).stdout


def can_destroy() -> bool:
    """Whether this kernel destroys sockets on request, and for this user."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        ends = [f"{host}:{port}" for host, port in (client.getsockname(), client.getpeername())]
        try:
            return Connection(ends[0], ends[1], frozenset()).destroy()
        except (OSError, subprocess.SubprocessError):
            return False


class SocketDestroyer:
    """Destroys one connection after another, at even intervals, in a thread, while it is entered.

    Args:
        find: The connections that may be destroyed.
        every: Seconds between two.
        seed: Decides which one.
    """

    def __init__(self, find: Callable[[], list[Connection]], *, every: float, seed: int = 0) -> None:
        self._find = find
        self._every = every
        self._random = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="socket-destroyer", daemon=True)
        self.destroyed = 0

    def __enter__(self) -> SocketDestroyer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            found = self._find()
            if found:
                self.destroyed += self._random.choice(found).destroy()

"""Connections to the control store: one that is made again when it breaks, and one whose waits can be ended."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist

from lightning_accelpact.recovery import sockets
from lightning_accelpact.recovery.endpoint import Endpoint


class ControlLost(RuntimeError):
    """The control store cannot be reached: nothing can be agreed any more."""


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

    @classmethod
    def given_up(cls, endpoint: Endpoint) -> bool:
        """Whether this process has given up the store there."""
        return (endpoint.host, endpoint.port) in cls._lost

    @property
    def _address(self) -> tuple[str, int]:
        return self._endpoint.host, self._endpoint.port

    def add(self, key: str, amount: int) -> int:
        """Add to a counter.

        Raises:
            Unanswered: if the connection broke, which the store does itself if the key holds no number.
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

"""This process's TCP connections, found and shut down by file descriptor and inode."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_TCP_ESTABLISHED = 1


def open_sockets() -> dict[int, str]:
    """Every socket of this process: its inode by descriptor."""
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # closed since the listing
        if target.startswith("socket:"):
            found[int(entry)] = target
    return found


@contextmanager
def borrow(fd: int) -> Iterator[socket.socket | None]:
    """A socket object on a duplicate of ``fd``, or ``None`` if it is closed by now."""
    try:
        link = socket.socket(fileno=os.dup(fd))
    except OSError:
        yield None
        return
    with link:
        yield link


def ports(fd: int) -> tuple[int, int]:
    """Local and remote port of a TCP connection; (0, 0) for anything else, such as a listening socket."""
    with borrow(fd) as link:
        if link is None or link.family not in (socket.AF_INET, socket.AF_INET6):
            return 0, 0
        try:
            return link.getsockname()[1], link.getpeername()[1]
        except OSError:
            return 0, 0


def limit_silence(fd: int, seconds: float) -> None:
    """Let a TCP connection fail once its peer's machine has answered nothing for some seconds.

    It is the kernel that answers, so a peer that computes, or is stopped, is not silent. Otherwise a connection over a link
    that was cut waits for ever if it has nothing to send, and some fifteen minutes if it has.
    """
    with borrow(fd) as link:
        # The descriptor may be somebody else's by now: the store's thread closes connections, and looks up names
        if link is not None and link.proto == socket.IPPROTO_TCP:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, max(1, round(1e3 * seconds)))


def _is_open(fd: int, inode: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}") == inode
    except OSError:
        return False


def shut(fd: int, inode: str) -> bool:
    """Shut one connection down, if the descriptor still is the socket it was.

    Returns:
        Whether it was still up.
    """
    with borrow(fd) as link:
        if link is None or not _is_open(fd, inode):
            return False
        try:
            link.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # already down
        return True


def is_established(fd: int, inode: str) -> bool:
    """Whether the descriptor still is that socket and its connection is up."""
    with borrow(fd) as link:
        if link is None or not _is_open(fd, inode):
            return False
        return link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_ESTABLISHED

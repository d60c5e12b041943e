"""This process's connections, whose descriptors other threads may close and use again at any moment."""

from __future__ import annotations

import os
import socket

import pytest

from lightning_accelpact.recovery.sockets import limit_silence


def test_a_connection_gets_a_limit() -> None:
    with socket.socket() as link:
        limit_silence(link.fileno(), 1.5)
        assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1500
        assert link.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1


@pytest.mark.parametrize("kind", [(socket.AF_INET, socket.SOCK_DGRAM), (socket.AF_UNIX, socket.SOCK_STREAM)], ids=str)
def test_what_is_no_connection_by_now_is_left_alone(kind: tuple[int, int]) -> None:
    with socket.socket(*kind) as other:
        limit_silence(other.fileno(), 1.5)
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0


def test_what_is_closed_by_now_is_left_alone() -> None:
    read, write = os.pipe()
    limit_silence(read, 1.5)
    os.close(read)
    os.close(write)
    limit_silence(read, 1.5)

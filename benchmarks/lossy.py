"""Loses incoming packets of this process's TCP connections, at random, as a bad link does; the kernel needs nothing for it.

A classic BPF program on each socket drops segments before TCP sees them, so that TCP has to send them again.
"""

from __future__ import annotations

import ctypes
import socket
import struct

from lightning_accelpact.recovery import sockets

_SO_ATTACH_FILTER = 26
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM
_LOAD, _JUMP_IF_GREATER, _RETURN = 0x20, 0x25, 0x06
_ALL = 0xFFFFFFFF


def lose_packets(share: float) -> int:
    """Drop this share of the incoming packets of every TCP socket that is open now, and of those that these accept.

    Returns:
        The number of sockets.

    Raises:
        ValueError: if ``share`` is not between 0 and 1.
    """
    if not 0 < share < 1:
        raise ValueError(f"share={share} must be between 0 and 1, as 0.05 for 5 %")
    program = _program(share)
    return sum(_attach(fd, program) for fd in sockets.open_sockets())


def _program(share: float) -> bytes:
    steps = [
        (_LOAD, 0, 0, _RANDOM),
        (_JUMP_IF_GREATER, 1, 0, int(share * _ALL)),
        (_RETURN, 0, 0, 0),  # drop
        (_RETURN, 0, 0, _ALL),  # keep
    ]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def _attach(fd: int, program: bytes) -> bool:
    with sockets.borrow(fd) as link:
        if link is None or link.proto != socket.IPPROTO_TCP:
            return False
        steps = ctypes.create_string_buffer(program, len(program))
        link.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", len(program) // 8, ctypes.addressof(steps)))
        return True

"""Packets are really lost, and TCP makes up for it."""

from __future__ import annotations

import socket
import threading

import pytest

from benchmarks.lossy import lose_packets


def test_lost_packets_are_sent_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            assert lose_packets(0.3) >= 3  # those of whoever runs this test, too
            content = bytes(range(256)) * 4096
            threading.Thread(target=sender.sendall, args=(content,), daemon=True).start()
            receiver.settimeout(60)
            received = bytearray()
            while len(received) < len(content):
                received += receiver.recv(1 << 16)
            assert received == content
            # struct tcp_info: tcpi_total_retrans is a 32-bit number at byte 100
            assert int.from_bytes(sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)[100:], "little") > 0


@pytest.mark.parametrize("share", [0, 1, 5])
def test_a_share_is_between_nothing_and_all(share: float) -> None:
    with pytest.raises(ValueError, match=f"share={share} must be between 0 and 1"):
        lose_packets(share)

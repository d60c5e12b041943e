"""Somebody who can reach the control store and has not got the run's secret."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Self

import torch.distributed as dist

from lightning_accelpact.recovery.secret import Seal

_VALIDATE = b"\0" + struct.pack("<I", 0x3C85F7CE)  # what torch's client says first
_SET = b"\1"
NAMESPACE = "accelpact/0"


def connect(port: int) -> dist.TCPStore:
    """A connection like a rank's own, below no namespace."""
    return dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))


def send(port: int, content: bytes) -> socket.socket:
    """Open a connection, write to it and leave it open."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=5)
    try:
        connection.sendall(content)
    except OSError:  # the store has hung up
        pass
    return connection


def garbage(port: int) -> list[socket.socket]:
    """Connections that do not speak the store's language, or stop in the middle of a word."""
    noise = [b"", b"\0", os.urandom(64), os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n"]
    broken = [_VALIDATE + bytes([query]) + os.urandom(16) for query in (0, 77, 255)]
    endless = [_VALIDATE + _SET + struct.pack("<Q", 1 << 62) + b"x" * 64]
    return [send(port, content) for content in noise + broken + endless]


def listening(port: int) -> set[str]:
    """The addresses on which somebody listens to a port."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for fields in (line.split() for line in list(lines)[1:]):
                address, _, number = fields[1].rpartition(":")
                if fields[3] == "0A" and int(number, 16) == port:
                    found.add(".".join(str(byte) for byte in reversed(bytes.fromhex(address))))
    return found


class Stranger:
    """Works against a run for as long as there is one.

    Args:
        port: Of the control store.
        work: What it does in each round, with a new connection.
        pause: Seconds between two rounds.
    """

    def __init__(self, port: int, work: Callable[[dist.TCPStore, int], object], *, pause: float = 0.02) -> None:
        self._port = port
        self._work = work
        self._pause = pause
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.rounds = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        left_open: list[socket.socket] = []
        while not self._over.wait(self._pause):
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                self._work(connect(self._port), self.rounds)
                left_open += [] if self.rounds else garbage(self._port)
                self.rounds += 1
            except (OSError, dist.DistError):  # nobody listens yet, or any more
                continue
        for connection in left_open:
            connection.close()


def forge(store: dist.TCPStore, rounds: int, *, secret: bytes = b"a guess, long enough") -> None:
    """Write, ahead of the ranks, what would stop or mislead the run if anybody believed it, and a flood of keys."""
    run = dist.PrefixStore(NAMESPACE, store)
    seal = Seal(secret, namespace=NAMESPACE, rank=1)
    stop = {"rank": 1, "reason": "stranger", "time": 0.0, "stop": True}
    lies = {f"notice/{number}": json.dumps({"generation": number, **stop}) for number in range(1, 9)}
    lies |= {f"vote/1/{generation}/{update}": "no" for generation in range(3) for update in range(20)}
    lies |= {f"operation/1/{generation}/{number}": "no" for generation in range(3) for number in range(20)}
    lies |= {f"report/{generation}/{rank}": "no" for generation in range(1, 4) for rank in range(4)}
    lies |= {f"release/{generation}": "yes" for generation in range(1, 4)} | {"leave/1": "[0, 0, 0]"}
    for key in lies:  # before anybody else has written there
        run.compare_set(key, "", seal.close(key, lies[key]) if rounds % 2 else lies[key])
    wakes = [f"wake/{generation}/{rank}" for generation in range(1, 9) for rank in range(4)]
    run.multi_set(wakes, [""] * len(wakes))
    for update in range(20):
        run.add(f"vote/1/0/{update}/count", 3)
    if not rounds % 50:
        run.set("ballot/2", "vote/1/0/1")
    run.multi_set([f"flood/{rounds}/{number}" for number in range(500)], ["x" * 200] * 500)


def replay(store: dist.TCPStore, rounds: int) -> None:
    """Say again in later generations and updates what the ranks have said in earlier ones."""
    prefix = f"/{NAMESPACE}/"
    run = dist.PrefixStore(NAMESPACE, store)
    for listed in store.list_keys():
        key = f"/{listed}".partition(prefix)[2]
        kind, _, rest = key.partition("/")
        if kind in ("notice", "report", "release", "vote", "operation") and not key.endswith("count"):
            numbers = rest.split("/")
            place = 0 if kind in ("notice", "report", "release") else 1
            genuine = run.get(key)
            for later in (1, 2):
                numbers[place] = str(int(rest.split("/")[place]) + later)
                run.compare_set("/".join([kind, *numbers]), "", genuine)


def delete(store: dist.TCPStore, rounds: int) -> None:
    """Delete whatever there is, once the updates have begun."""
    keys = store.list_keys()
    if any("/vote/" in f"/{key}" for key in keys):
        for key in keys:
            store.delete_key(key)

"""Two nodes on one machine: network namespaces with a data link and a control link between them, which can be broken."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_NETWORKS = {"data": "10.77.0", "control": "10.78.0"}
# Ends with its parent, however that ends, and takes the namespaces along
_REAPER = 'while kill -0 "$0" 2>/dev/null; do sleep 0.2; done; for name in "$@"; do ip netns del "$name" 2>/dev/null; done'


class Lab:
    """Two nodes, while it is entered. Each has the interfaces ``data`` and ``control``.

    Needs root, iproute2 and the kernel's network namespaces.
    """

    nodes = (0, 1)

    def __init__(self) -> None:
        self._names = [f"accelpact-{os.getpid()}-{node}" for node in self.nodes]
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Lab:
        # Before there is anything to take away. In a session of its own, out of the reach of a terminal's signals
        command = ["sh", "-c", _REAPER, str(os.getpid()), *self._names]
        self._reaper = subprocess.Popen(command, start_new_session=True)
        try:
            self._build()
        except BaseException:  # also an interrupt: what has been made so far must not stay; raised again
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _build(self) -> None:
        for name in self._names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        for network, prefix in _NETWORKS.items():
            first, second = self._names
            peer = ["peer", "name", network, "netns", second]
            _run("ip", "-n", first, "link", "add", network, "type", "veth", *peer)
            for node, name in enumerate(self._names):
                _run("ip", "-n", name, "addr", "add", f"{prefix}.{node + 1}/24", "dev", network)
                _run("ip", "-n", name, "link", "set", network, "up")

    def close(self) -> None:
        """Take the namespaces away."""
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=10)
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.wait()

    @staticmethod
    def address(node: int, network: str) -> str:
        """A node's address on ``data`` or ``control``."""
        return f"{_NETWORKS[network]}.{node + 1}"

    def name(self, node: int) -> str:
        """The namespace of a node."""
        return self._names[node]

    # -- what can be done to a link

    def cut(self, network: str = "data", *, nodes: tuple[int, ...] = nodes) -> None:
        """Lose every packet that these nodes send: both for a cut link, one for a link that is blocked one way.

        Connections stay, and nobody is told, as with a cable that is pulled behind a switch.
        """
        for node in nodes:
            _run("ip", "-n", self._names[node], "route", "replace", "blackhole", f"{self.address(1 - node, network)}/32")

    def mend(self, network: str = "data") -> None:
        """The link is as new."""
        for node in self.nodes:
            route = ["route", "del", "blackhole", f"{self.address(1 - node, network)}/32"]
            subprocess.run(["ip", "-n", self._names[node], *route], check=False, capture_output=True, timeout=10)

    def destroy_sockets(self, network: str = "data") -> None:
        """Let the kernel reset every connection over a network."""
        for node, name in enumerate(self._names):
            _run("ip", "netns", "exec", name, "ss", "-K", "src", self.address(node, network))


def enter_node(name: str, job: Callable[..., T], *args: Any) -> T:
    """Run a job in a node: moves this process there, which must have no other threads yet that use the network."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"this process cannot enter {name}")
    return job(*args)


def why_not() -> str:
    """Why there can be no lab here; empty if there can."""
    try:
        with Lab() as lab:
            lab.cut()
            lab.mend()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        return f"no network namespaces here: {said.decode().strip()}"
    return ""


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=10)

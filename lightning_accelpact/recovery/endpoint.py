"""Where the control store is, who serves it, and on which address it listens."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from lightning_accelpact.recovery import sockets

_SIOCGIFADDR = 0x8915


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

"""Where the control store is, who serves it, and on which address it listens."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import struct
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from lightning_accelpact.recovery import sockets
from lightning_accelpact.recovery.secret import Seal, run_secret

_SIOCGIFADDR = 0x8915
LOOK_AGAIN_S = 0.02  # for something that the store cannot wait for


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """Where the control store lives.

    Args:
        host: Address that every rank can reach.
        port: TCP port.
        hosted_here: Whether this process serves it. Under an elastic agent, which outlives every rank, no rank does.
        namespace: Prefix of all keys; differs between attempts of a relaunched job.
        silence: Seconds after which a connection counts as broken whose other end does not answer.
        secret: The run's.
    """

    host: str
    port: int
    hosted_here: bool
    namespace: str = "accelpact"
    silence: float = 3.0
    secret: bytes = field(default=b"", repr=False)

    @classmethod
    def from_environment(
        cls, *, host: str, port: int, rank: int, world_size: int, interface: str | None, deadline: timedelta
    ) -> Endpoint:
        """The store at the launcher's rendezvous address, or on a network interface of its own.

        Args:
            host: The launcher's rendezvous host.
            port: And its port; the elastic agent serves a store there where there is one, else rank 0 does.
            rank: Global rank of this process.
            world_size: Number of ranks.
            interface: Interface of rank 0's node to serve the store on; ``None`` to stay at the rendezvous address.
            deadline: How long to wait for rank 0.

        Raises:
            ValueError: if the secret that was handed out is none.
        """
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        meeting = cls(
            host=host,
            port=port,
            hosted_here=rank == 0 and not by_agent,
            namespace=f"accelpact/{attempt}",
            secret=run_secret(),
        )
        return meeting if interface is None else meeting._moved(interface, rank, world_size, deadline)

    def seal(self, rank: int) -> Seal:
        """Seals what this rank writes to the store, and opens what others have written."""
        return Seal(self.secret, namespace=self.namespace, rank=rank)

    def _moved(self, interface: str, rank: int, world_size: int, deadline: timedelta) -> Endpoint:
        """Rank 0 opens a store on the interface, and the others learn of it at the meeting point."""
        server, store, seal = self.serve(), self.connect(deadline), self.seal(rank)
        if rank == 0:
            with _listen(interface_address(interface), 0) as free:
                store.set("endpoint", seal.close("endpoint", json.dumps(free.getsockname())))
        host, port = json.loads(_announced(store, seal, deadline))
        store.set(f"met/{rank}", "")
        if server is not None:  # it ends here: nobody listens but on the interface
            store.wait([f"met/{peer}" for peer in range(world_size)], deadline)
        return replace(self, host=host, port=port, hosted_here=rank == 0)

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


def _announced(store: dist.Store, seal: Seal, deadline: timedelta) -> str:
    """What rank 0 has written at the meeting point."""
    limit = time.monotonic() + deadline.total_seconds()
    store.wait(["endpoint"], deadline)
    while (message := seal.open("endpoint", store.get("endpoint"))) is None:
        if time.monotonic() > limit:
            raise TimeoutError("rank 0 has not said where the control store is: is the secret the same on all ranks?")
        time.sleep(LOOK_AGAIN_S)
    return message.text


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on the address of ``host`` alone, or on all if that address is not one of this machine's.

    Raises:
        OSError: names the address and what to do.
    """
    try:
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
    except OSError as error:
        raise OSError(
            error.errno,
            f"rank 0 cannot serve the control store on {host}:{port} ({error.strerror}): choose another MASTER_ADDR or"
            " MASTER_PORT",
        ) from error
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

"""The ranks of one generation, and their process groups."""

from __future__ import annotations

import os
import socket
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Messages to a rank that are kept: in a ring the next rank can be as far behind as there are ranks
_POSTED = 32
_LINK_POSTED = 2


@dataclass
class World:
    """The members that train together from one formation to the next.

    A member keeps its number for the whole run; its rank is its place among those that are left.

    Args:
        members: In the order of their ranks.
        member: This process.
        generation: How many formations there were before.
        timeout_s: What the groups wait for a silent peer, seconds.
    """

    members: tuple[int, ...]
    member: int
    generation: int
    timeout_s: float

    @property
    def rank(self) -> int:
        return self.members.index(self.member)

    @property
    def size(self) -> int:
        return len(self.members)

    def form(self, store: dist.Store) -> None:
        """Make the default group. No keys are shared with earlier generations: they hold addresses of the dead.

        Raises:
            RuntimeError: if not all members come in time.
        """
        self._store = store
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"generation {self.generation}", store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout_s),
        )

    def link(self, peer: int) -> Link:
        """A connection with another rank that is apart from all groups; that rank has to ask for it, too."""
        low, high = sorted((self.rank, peer))
        store = dist.PrefixStore(f"generation {self.generation} link {low} {high}", self._store)
        timeout = timedelta(seconds=self.timeout_s)
        # Not new_group(): with local synchronization that needs both to have made the same number of groups before
        return Link(dist.ProcessGroupGloo(store, int(self.rank > peer), 2, timeout), int(self.rank < peer))


@dataclass(frozen=True)
class Link:
    """A connection with one other rank.

    Args:
        group: Of the two.
        peer: The other one's rank in it.
    """

    group: dist.ProcessGroupGloo
    peer: int
    posted: deque[Any] = field(default_factory=lambda: deque(maxlen=_LINK_POSTED))

    def post(self, tensor: Tensor) -> None:
        """Send, without waiting; see :func:`post`."""
        kept = [tensor.clone()]
        self.posted.append((self.group.send(kept, self.peer, 0), kept))

    def receive(self, tensor: Tensor) -> None:
        """Raises RuntimeError if the other one is lost, or silent for too long."""
        self.group.recv([tensor], self.peer, 0).wait()

    def swap(self, outgoing: Tensor, incoming: Tensor) -> None:
        """Send and receive at the same time."""
        self.post(outgoing)
        self.receive(incoming)


def leave_groups() -> None:
    """Take this process out of all groups."""
    _posted.clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def shut_links(spared_port: int) -> None:
    """Shut this process's TCP connections, so that whoever waits for a peer, here or there, comes out of it at once.

    Args:
        spared_port: Of the store, whose connections stay.
    """
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as link:
                if link.family in (socket.AF_INET, socket.AF_INET6) and link.getpeername()[1] != spared_port:
                    link.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # not connected, or closed since the listing


_posted: dict[int, deque[Any]] = {}


def post(tensor: Tensor, to: int) -> None:
    """Send to a rank without waiting for it.

    Gloo can lose sight of what it is sending when a connection fails: who waits for that would wait for the whole
    timeout, while a receiver is told at once. So exchanges wait for what they receive. A copy is kept until the
    receiver must have it, since what it sent later has been received.
    """
    kept = tensor.clone()
    _posted.setdefault(to, deque(maxlen=_POSTED)).append((dist.isend(kept, to), kept))


def swap(outgoing: Tensor, incoming: Tensor, *, to: int, source: int) -> None:
    """Send to one rank and receive from another, at the same time."""
    post(outgoing, to)
    dist.recv(incoming, source)


def gather_numbers(own: int) -> list[int]:
    """A number of each rank."""
    gathered = torch.zeros(dist.get_world_size(), dtype=torch.int64)
    gathered[dist.get_rank()] = own
    dist.all_reduce(gathered)
    return gathered.tolist()

"""Fresh worlds of ranks for probes: all on this machine, or one rank per process of the user's launcher."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol

import torch.distributed as dist

from lightning_accelpact.qualification.outcome import Outcome, Rank

_PLACES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_LAUNCHERS = ("TORCHELASTIC_", "GROUP_", "ROLE_", "ACCELERATE_", "SLURM_", "PL_")
_LATE_S = 30.0  # that a launched process may be behind another one


class World(Protocol):
    """Runs a job on every rank of a fresh world.

    Args:
        size: Number of ranks.
        leads: Whether this process is to print and write.
    """

    size: int
    leads: bool

    def run(self, job: Callable[..., Any], *args: Any, deadline: float) -> list[Outcome]:
        """What became of each rank, in rank order; the same list in every process that takes part.

        Args:
            job: What each rank does.
            args: With what.
            deadline: Seconds after which ranks that are still there are killed.
        """


class LocalWorld:
    """All ranks on this machine.

    Args:
        size: Number of ranks.
    """

    leads = True

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, job: Callable[..., Any], *args: Any, deadline: float) -> list[Outcome]:
        until = time.monotonic() + deadline
        port = str(free_port())
        ranks = [Rank(job, args, self._environment(rank, port)) for rank in range(self.size)]
        return [rank.outcome(until) for rank in ranks]

    def _environment(self, rank: int, port: str) -> dict[str, str]:
        place = _place("127.0.0.1", port, rank=rank, size=self.size, local_size=self.size)
        return {"GLOO_SOCKET_IFNAME": "lo", **strip_launcher(os.environ), **place}


class LaunchedWorld:
    """One rank of each world in every process that the user's launcher has started.

    Args:
        environment: Where the launcher has said the place of this process.
        deadline: Seconds that the processes may take to meet.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ, *, deadline: float = 600.0) -> None:
        self._rank, self.size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        self._local_size = int(environment.get("LOCAL_WORLD_SIZE", self.size))
        self._host = environment.get("MASTER_ADDR", "127.0.0.1")
        by_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._wait = timedelta(seconds=deadline)
        self._store = dist.PrefixStore(
            f"accelpact qualify/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}",
            dist.TCPStore(
                self._host,
                int(environment.get("MASTER_PORT", "29500")),
                is_master=self._rank == 0 and not by_agent,
                wait_for_workers=False,
                timeout=self._wait,
            ),
        )
        self._runs = 0

    @property
    def leads(self) -> bool:
        return self._rank == 0

    def run(self, job: Callable[..., Any], *args: Any, deadline: float) -> list[Outcome]:
        self._runs += 1
        topic = f"world {self._runs}"
        if self._rank == 0:
            self._store.set(f"{topic}/port", str(free_port()))
        port = self._store.get(f"{topic}/port").decode()
        place = _place(self._host, port, rank=self._rank, size=self.size, local_size=self._local_size)
        rank = Rank(job, args, {**strip_launcher(os.environ), **place})
        own = rank.outcome(time.monotonic() + deadline)
        self._store.set(f"{topic}/{self._rank}", json.dumps(asdict(own)))
        wait = timedelta(seconds=deadline + _LATE_S)
        return [self._outcome(f"{topic}/{peer}", wait) for peer in range(self.size)]

    def _outcome(self, key: str, wait: timedelta) -> Outcome:
        try:
            self._store.wait([key], wait)
        except dist.DistStoreError:
            return Outcome(failure="the process that was to watch this rank has not answered")
        return Outcome(**json.loads(self._store.get(key)))

    def close(self) -> None:
        """Leave; the process that serves the store leaves last."""
        self._store.set(f"left/{self._rank}", "")
        if self.leads:
            self._store.wait([f"left/{peer}" for peer in range(self.size)], self._wait)


def _place(host: str, port: str, *, rank: int, size: int, local_size: int) -> dict[str, str]:
    """The variables by which a rank finds its place, as torchrun sets them."""
    local, node = rank % local_size, rank // local_size
    return dict(zip(_PLACES, map(str, (rank, size, local, local_size, node, host, port)), strict=True))


def strip_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a launcher has said in it, for processes that form a world of their own."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _PLACES and not name.startswith(_LAUNCHERS)
    }


def free_port() -> int:
    """A port that the system considers free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

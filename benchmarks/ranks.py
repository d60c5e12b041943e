"""The ranks of a measurement: one process each, forked from a server that has imported everything."""

from __future__ import annotations

import multiprocessing
import os
import socket
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

from lightning_accelpact.recovery import session

T = TypeVar("T")

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["lightning.pytorch", "benchmarks.training"])


def run_ranks(job: Callable[..., T], world_size: int, *args: Any) -> list[T]:
    """Run ``job(*args)`` on every rank of a fresh world on this machine.

    Args:
        job: A function of an importable module; finds its rank in the environment, as under torchrun.
        world_size: Number of processes.
        args: Passed to every rank; pickled.

    Returns:
        What the ranks returned, in rank order.

    Raises:
        BaseException: the first exception of a rank, once all ranks have ended.
    """
    world = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    with ProcessPoolExecutor(world_size, mp_context=_context) as pool:
        ranks = [
            pool.submit(_as_rank, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}, job, args)
            for rank in range(world_size)
        ]
        return [rank.result() for rank in ranks]


def _as_rank(environment: dict[str, str], job: Callable[..., T], args: tuple[Any, ...]) -> T:
    os.environ.update(environment)
    try:
        return job(*args)
    finally:
        session.close()  # a forked process runs no exit handlers


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

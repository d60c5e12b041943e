"""Real processes for tests: forked from a server that has imported everything, so that a rank starts in milliseconds."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_accelpact.recovery import session

_WARM = [
    "torch", "torch.distributed", "lightning.pytorch", "lightning_accelpact.strategy", "jobs", "jobs_fabric",
    "jobs_accelerate",
]  # fmt: skip
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(_WARM)


@dataclass
class RankResult:
    """What became of one rank.

    Args:
        value: What the job returned; ``None`` if it did not return.
        error: The traceback if it raised.
        exit_code: The process's exit code; negative for a signal.
        output: All it printed.
    """

    value: Any
    error: str
    exit_code: int | None
    output: str


def free_port() -> int:
    """A port that the system considers free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(
    job: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120.0, env: dict[str, str] | None = None
) -> list[RankResult]:
    """Run ``job(*args)`` on every rank of a fresh world and wait for all of them.

    Args:
        job: A function of an importable module; finds its rank in the environment, as under torchrun.
        world_size: Number of processes.
        args: Passed to every rank.
        timeout: Seconds until what is left is killed; its exit code is -9 then.
        env: More environment variables for every rank.
    """
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TEST_DUMP_AFTER": str(timeout * 0.9),
        **(env or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        ranks = [_Rank(job, args, rank, environment, Path(folder)) for rank in range(world_size)]
        deadline = time.monotonic() + timeout
        return [rank.result(deadline) for rank in ranks]


class _Rank:
    def __init__(self, job: Callable[..., Any], args: tuple, rank: int, env: dict[str, str], folder: Path) -> None:
        self._output = folder / f"rank{rank}.txt"
        self._inbox, outbox = _context.Pipe(duplex=False)
        local = {**env, "LOCAL_RANK": str(rank), "RANK": str(rank)}
        self._process = _context.Process(target=_main, args=(job, args, local, str(self._output), outbox))
        self._process.start()
        outbox.close()

    def result(self, deadline: float) -> RankResult:
        value, error = None, ""
        try:
            if self._inbox.poll(max(0.0, deadline - time.monotonic())):
                value, error = self._inbox.recv()
        except EOFError:
            error = "the process ended without a result"
        self._process.join(max(0.1, deadline - time.monotonic()))
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        return RankResult(value, error, self._process.exitcode, self._output.read_text(errors="replace"))


def _main(job: Callable[..., Any], args: tuple, env: dict[str, str], output: str, outbox: Any) -> None:
    os.environ.update(env)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    faulthandler.dump_traceback_later(float(env["TEST_DUMP_AFTER"]), exit=False)  # where a stuck rank stands; a dump may crash it
    try:
        outbox.send((job(*args), ""))
    except BaseException as error:  # reported to the parent, and passed on as the exit code
        outbox.send((None, traceback.format_exc()))
        sys.exit(error.code if isinstance(error, SystemExit) else 1)
    finally:
        session.close()  # atexit does not run in a forked child


def values(results: list[RankResult]) -> list[Any]:
    """The ranks' return values; fails with what every rank said if one did not end well."""
    report = "\n".join(
        f"--- rank {rank}: exit code {result.exit_code}\n{result.output[-3000:]}\n{result.error[-3000:]}"
        for rank, result in enumerate(results)
    )
    assert all(result.exit_code == 0 for result in results), report
    return [result.value for result in results]

"""Real processes for tests: forked from a server that has imported everything, so that a rank starts in milliseconds."""

from __future__ import annotations

import atexit
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
from typing import Any, ClassVar

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
    job: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
    reuse: bool = False,
) -> list[RankResult]:
    """Run ``job(*args)`` on every rank of a fresh world and wait for all of them.

    Args:
        job: A function of an importable module; finds its rank in the environment, as under torchrun.
        world_size: Number of processes.
        args: Passed to every rank.
        timeout: Seconds until what is left is killed; its exit code is -9 then.
        env: More environment variables for every rank.
        reuse: The processes that did this job last may do it again, if it ended well in all of them: as a further run
            of their session, in half the time. For jobs that differ in nothing that a session keeps.
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
    processes = _Processes.of(job, world_size) if reuse else _Processes(job, world_size)
    return processes.run(args, environment, timeout)


class _Processes:
    """The ranks of a world, and of the next one that does the same job if they are kept."""

    _JOBS = 20  # what a retired group leaves behind adds up
    _kept: ClassVar[_Processes | None] = None

    def __init__(self, job: Callable[..., Any], world_size: int, *, keep: bool = False) -> None:
        self._job, self._keep, self._left = job, keep, self._JOBS
        self._ranks = [_Rank(rank) for rank in range(world_size)]

    @classmethod
    def of(cls, job: Callable[..., Any], world_size: int) -> _Processes:
        """Those that are kept, if they did this job; no others are kept besides."""
        if (kept := cls._kept) is None or (kept._job, len(kept._ranks)) != (job, world_size):
            cls.close()
            cls._kept = kept = cls(job, world_size, keep=True)
        return kept

    @classmethod
    def close(cls) -> None:
        """End those that are kept."""
        if (kept := cls._kept) is not None:
            cls._kept = None
            kept._end(time.monotonic() + 10)

    def run(self, args: tuple, env: dict[str, str], timeout: float) -> list[RankResult]:
        deadline = time.monotonic() + timeout
        self._left -= 1
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / f"rank{rank}.txt" for rank in range(len(self._ranks))]
            for rank, output in zip(self._ranks, outputs, strict=True):
                rank.begin((self._job, args, env, str(output)))
            answers = [rank.answer(deadline) for rank in self._ranks]
            codes: list[int | None] = [0] * len(answers)
            if not self._keep or self._left == 0 or any(error for _, error in answers):
                if self._keep:
                    _Processes._kept = None
                codes = self._end(deadline)
            texts = [output.read_text(errors="replace") if output.exists() else "" for output in outputs]
        return [RankResult(*answer, code, text) for answer, code, text in zip(answers, codes, texts, strict=True)]

    def _end(self, deadline: float) -> list[int | None]:
        for rank in self._ranks:
            rank.let_go()
        return [rank.exit_code(deadline) for rank in self._ranks]


class _Rank:
    def __init__(self, rank: int) -> None:
        self._pipe, theirs = _context.Pipe()
        self._process = _context.Process(target=_main, args=(rank, theirs))
        self._process.start()
        theirs.close()

    def begin(self, request: tuple) -> None:
        self._pipe.send(request)

    def answer(self, deadline: float) -> tuple[Any, str]:
        """What the job returned and the traceback if it raised."""
        try:
            if self._pipe.poll(max(0.0, deadline - time.monotonic())):
                return self._pipe.recv()
        except (EOFError, ConnectionResetError):
            return None, "the process ended without a result"
        return None, "no result in time"

    def let_go(self) -> None:
        self._pipe.close()

    def exit_code(self, deadline: float) -> int | None:
        self._process.join(max(0.1, deadline - time.monotonic()))
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        return self._process.exitcode


atexit.register(_Processes.close)  # before multiprocessing waits for them


def _main(rank: int, pipe: Any) -> None:
    before = dict(os.environ)
    try:
        while True:
            job, args, env, output = pipe.recv()
            os.environ.update({**env, "LOCAL_RANK": str(rank), "RANK": str(rank)})
            pipe.send((_result(pipe, job, args, output), ""))
            os.environ.clear()
            os.environ.update(before)
    except EOFError:
        return
    finally:
        session.close()  # atexit does not run in a forked child


def _result(pipe: Any, job: Callable[..., Any], args: tuple, output: str) -> Any:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    # Where a stuck rank stands; a dump may crash it
    faulthandler.dump_traceback_later(float(os.environ["TEST_DUMP_AFTER"]), exit=False)
    try:
        return job(*args)
    except BaseException as error:  # reported to the parent, and passed on as the exit code
        pipe.send((None, traceback.format_exc()))
        sys.exit(error.code if isinstance(error, SystemExit) else 1)
    finally:
        faulthandler.cancel_dump_traceback_later()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()


def values(results: list[RankResult]) -> list[Any]:
    """The ranks' return values; fails with what every rank said if one did not end well."""
    report = "\n".join(
        f"--- rank {rank}: exit code {result.exit_code}\n{result.output[-3000:]}\n{result.error[-3000:]}"
        for rank, result in enumerate(results)
    )
    assert all(result.exit_code == 0 for result in results), report
    return [result.value for result in results]

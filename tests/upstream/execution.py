"""Runs translated tests in processes of their own, each rank with the plugin, and puts together what became of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tests.upstream.plugin import RESULTS

_REPOSITORY = Path(__file__).parents[2]
# Lightning's settings make every FutureWarning an error, also one of a torch that came out after them
_OPTIONS = ("-p", "no:cacheprovider", "-q", "--color=no", "-W", "ignore:torch.distributed.nn.functional:FutureWarning")
_SETTINGS = {"OMP_NUM_THREADS": "1", "RES_OPTIONS": "timeout:1 attempts:1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
_LAUNCHER = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_PATIENCE = 30.0  # seconds for the other ranks to tear a test down, after the first one has

Verdict = Literal["passed", "failed", "skipped"]


class NotCollected(Exception):
    """pytest could not import the tests; the message is what it printed."""


@dataclass(frozen=True)
class Outcome:
    """What became of a test.

    Args:
        verdict: Of all its ranks and phases together.
        reason: Why it failed or was skipped.
        world_size: Number of its ranks.
        output: All that they printed.
    """

    verdict: Verdict
    reason: str = ""
    world_size: int = 1
    output: str = ""


class Suite:
    """Lightning's tests, copied and translated.

    Args:
        tests: The folder from which they are imported.
        limit: Seconds that a call of :meth:`run` may take.
    """

    def __init__(self, tests: Path, limit: float) -> None:
        self._tests = tests
        self._limit = limit

    def collect(self, modules: Sequence[str]) -> list[str]:
        """The tests of these modules, as pytest names them.

        Raises:
            NotCollected: if a module cannot be imported.
        """
        with tempfile.TemporaryDirectory() as results:
            status, output = self._pytest([*modules, "--collect-only"], Path(results))
            if status != 0:
                raise NotCollected(output)
            return [test for [names] in _read(Path(results), "collected") for test in names]

    def run(self, tests: Sequence[str]) -> dict[str, Outcome]:
        """Run some tests one after the other, in one process and in those that the tests start."""
        with tempfile.TemporaryDirectory() as results:
            status, output = self._pytest(tests, Path(results))
            phases = [phase for rank in _read(Path(results), "ran") for phase in rank]
        if len(tests) > 1 and status == 1:
            status = 0  # some test has failed: which one, its phases tell
        by_test = {test: [phase for phase in phases if phase["test"] == test] for test in tests}
        return {test: outcome_of(status, of_test, output) for test, of_test in by_test.items()}

    def _pytest(self, arguments: Sequence[str], results: Path) -> tuple[int | None, str]:
        """pytest's exit status, ``None`` if it took too long, and what it and all ranks printed."""
        command = [sys.executable, "-m", "pytest", "-p", "tests.upstream.plugin", *_OPTIONS]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=self._tests,
                env=self._environment(results),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its ranks are in its process group
            )
            try:
                status = process.wait(self._limit)
                if status == 0:
                    _wait_for_ranks(results)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _kill_group(process)
            output.seek(0)
            return status, output.read()

    def _environment(self, results: Path) -> dict[str, str]:
        path = os.pathsep.join([str(_REPOSITORY), str(self._tests)])
        inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
        return {**inherited, **_SETTINGS, "PYTHONPATH": path, RESULTS: str(results)}


def _wait_for_ranks(results: Path) -> None:
    deadline = time.monotonic() + _PATIENCE
    while not _complete(_read(results, "ran")) and time.monotonic() < deadline:
        time.sleep(0.1)


def _complete(ranks: list[list[dict[str, Any]]]) -> bool:
    world_size = max((phase["world_size"] for rank in ranks for phase in rank), default=0)
    return len([rank for rank in ranks if any(phase["when"] == "teardown" for phase in rank)]) >= world_size


def _kill_group(process: subprocess.Popen) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all of its ranks have exited
    process.wait()


def _read(results: Path, kind: str) -> list[list[Any]]:
    files = sorted(results.glob(f"{kind}-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def outcome_of(status: int | None, phases: list[dict[str, Any]], output: str) -> Outcome:
    """What became of a test.

    Args:
        status: pytest's exit status, if that is this test's; ``None`` if it was stopped at the time limit.
        phases: The set-up, call and teardown on each rank, as the plugin reports them.
        output: All that the ranks printed.
    """
    world_size = max((phase["world_size"] for phase in phases), default=1)
    failed = [phase["reason"] for phase in phases if phase["outcome"] in ("failed", "expected failure")]
    skipped = [phase["reason"] for phase in phases if phase["outcome"] == "skipped"]
    finished = len([phase for phase in phases if phase["when"] == "teardown"])
    if failed:
        return Outcome("failed", failed[0], world_size, output)
    if finished < world_size or status != 0:
        end = "was stopped at the time limit" if status is None else f"ended with exit status {status}"
        reason = f"{finished} of {world_size} ranks came to its end; pytest {end}"
        return Outcome("failed", reason, world_size, output)
    if skipped:
        return Outcome("skipped", skipped[0])
    return Outcome("passed", world_size=world_size)

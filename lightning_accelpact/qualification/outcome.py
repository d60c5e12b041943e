"""What became of one rank of a probe, which may have been killed or may hang."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

_fork = multiprocessing.get_context("fork")
_PR_SET_PDEATHSIG = 1
_GRACE_S = 2.0  # for the end of a rank that has said its result
_HUNG = "hung: still there at the deadline, and killed then"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one rank came to.

    Args:
        value: What its job returned, as JSON values.
        failure: Why there is none; empty if it returned.
    """

    value: Any = None
    failure: str = ""


class Rank:
    """One rank of a probe, in a process of its own that was forked from this one, which has imported everything.

    Args:
        job: What it does; returns JSON values.
        args: With what.
        environment: All its environment variables.
    """

    def __init__(self, job: Callable[..., Any], args: tuple[Any, ...], environment: Mapping[str, str]) -> None:
        self._inbox, outbox = _fork.Pipe(duplex=False)
        self._process = _fork.Process(target=_live, args=(job, args, dict(environment), outbox), daemon=True)
        self._process.start()
        outbox.close()

    def outcome(self, until: float) -> Outcome:
        """Wait for the end of the rank; what is still there at the deadline is killed, with its children.

        Args:
            until: Deadline, of the monotonic clock.
        """
        value = self._value(until)
        hung = value is None and time.monotonic() >= until
        wait([self._process.sentinel], 0 if hung else _GRACE_S)
        try:  # before it is reaped, when its number could be somebody else's
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it had not come so far as to have a group
            self._process.kill()
        self._process.join()
        self._inbox.close()
        if value is not None:
            return Outcome(**value)
        return Outcome(failure=_HUNG if hung else _ending(self._process.exitcode))

    def _value(self, until: float) -> dict[str, Any] | None:
        try:
            return self._inbox.recv() if self._inbox.poll(max(0.0, until - time.monotonic())) else None
        except EOFError:
            return None


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        return f"process killed by {signal.Signals(-code).name}"
    return f"process ended with exit code {code} and no result"


def die_with_parent() -> None:
    """Let the system kill this process when the one that has started it ends, however it does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _live(job: Callable[..., Any], args: tuple[Any, ...], environment: dict[str, str], outbox: Connection) -> None:
    """The life of the rank's process."""
    os.setpgid(0, 0)  # with the processes that it starts
    die_with_parent()
    faulthandler.disable()  # a crash is a result, and no news
    os.environ.clear()
    os.environ.update(environment)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    try:
        message = {"value": job(*args)}
    except BaseException as error:  # also a fail-stop's SystemExit: whatever it is, it is the probe's result
        last = traceback.extract_tb(error.__traceback__)[-1]
        message = {"failure": f"{type(error).__name__}: {error} (line {last.lineno} of {os.path.basename(last.filename)})"}
    outbox.send(message)
    outbox.close()
    os._exit(0)  # what a broken stack does at the exit of the interpreter is not asked

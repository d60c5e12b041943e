"""Learns how a script ends, for a run whose loop is the script's own and may not say that it is over."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Protocol


class Run(Protocol):
    """What has to be ended in good order."""

    def on_exception(self, error: BaseException) -> None:
        """The script ends with this error, which nobody has caught; a ``SystemExit`` is none."""

    def on_exit(self) -> None:
        """The interpreter exits, after an error or without one."""


_watched: Run | None = None
_process = 0


def watch(run: Run) -> None:
    """Tell ``run`` how the script ends, instead of the run that was watched before."""
    global _watched, _process
    if not _process:
        sys.excepthook = partial(_on_uncaught, sys.excepthook)
        atexit.register(_on_exit)
    _watched, _process = run, os.getpid()


def _on_uncaught(
    hook: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    hook(kind, error, trace)
    if _watched is not None:
        _watched.on_exception(error)


def _on_exit() -> None:
    global _watched
    run, _watched = _watched, None
    if run is None or os.getpid() != _process:  # a child that was forked from the rank
        return
    try:
        run.on_exit()
    except SystemExit as stop:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stop.code)  # raised from here it would be printed, and the exit status stay as it is

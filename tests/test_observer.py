"""What ends a run that Lightning's own launcher has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import adapters
import lightning
import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver

from lightning_accelpact import loop, observer


def observed() -> tuple[_ChildProcessObserver, subprocess.Popen]:
    """An observer of a child that has ended badly, and of another one; it would kill this other one, too."""
    bad = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    bad.wait()
    other = subprocess.Popen(["sleep", "60"])
    return _ChildProcessObserver(main_pid=other.pid, child_processes=[bad, other], sleep_period=0), other


def test_the_adapter_touches_what_is_there() -> None:
    adapters.require_checked(observer, "lightning", lightning.__version__, loop.CHECKED_LIGHTNING)
    thread = _ChildProcessObserver(main_pid=os.getpid(), child_processes=[])
    adapters.require(observer, f"lightning {lightning.__version__}", "_ChildProcessObserver", thread, "_child_processes")
    assert adapters.private_names(observer) == {"_ChildProcessObserver", "_child_processes"}


@pytest.mark.parametrize("stands_down", [False, True])
def test_it_kills_nobody_once_the_run_ends_by_itself(stands_down: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    thread, other = observed()
    monkeypatch.setattr(observer.threading, "enumerate", lambda: [thread])
    if stands_down:
        observer.stand_down()
    thread.run()
    try:
        if stands_down:
            assert other.poll() is None
        else:
            assert other.wait(10) == -signal.SIGKILL
    finally:
        other.kill()
        other.wait()

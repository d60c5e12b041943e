"""Lightning's own launcher watches the ranks that it has started, in a thread of rank 0. Checked against lightning 2.6.

Up to five seconds after one has ended badly it kills the others and rank 0 itself, whatever they are doing. A run that
fail-stops ends by itself, on every rank, and must not be kept from saying so by its exit status.
"""

from __future__ import annotations

import threading

from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver


def stand_down() -> None:
    """Let every rank end by itself; does nothing on ranks that have started no others."""
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            thread._child_processes = []  # it sees to none of them any more

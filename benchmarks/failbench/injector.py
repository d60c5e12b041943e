"""The injector: faults strike inside their victims, at the planned step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from benchmarks.failbench.messages import Striking
from benchmarks.failbench.record import InjectedFault

_SIGNALS = {"kill": signal.SIGKILL, "preempt": signal.SIGKILL, "hang": signal.SIGSTOP}


class Injector:
    """Strikes this process when it is due.

    Victims of the same step meet first, so that they are struck at the same moment.

    Args:
        faults: The whole schedule.
        member: This process.
        last_step: In which a fault strikes at the latest, due or not.
        offset_s: How far into its step a fault strikes, seconds.
        store: Where victims meet.
        announce: Sends a message out of this process.
    """

    def __init__(
        self,
        faults: Sequence[InjectedFault],
        *,
        member: int,
        last_step: int,
        offset_s: float,
        store: dist.Store,
        announce: Callable[[Striking], None],
    ) -> None:
        self._own = next((fault for fault in faults if fault.rank == member), None)
        self._together = [fault.rank for fault in faults if self._own and fault.step == self._own.step]
        self._offset = offset_s
        self._store = store
        self._announce = announce
        self._warned = False
        self._last_step = last_step
        self._hurry = threading.Event()
        signal.signal(signal.SIGUSR1, self._on_warning)

    def at(self, step: int) -> bool:
        """At the beginning of a step: arm the fault that is planned for it.

        Returns:
            Whether a warning came.
        """
        self._warned = False
        if self._own is not None and step >= self._own.step:
            fault, self._own = self._own, None
            due = self._meet(fault) + fault.warning_s
            threading.Thread(target=self._strike, args=(fault, due), daemon=True).start()
            if fault.warning_s:
                os.kill(os.getpid(), signal.SIGUSR1)  # runs the handler before the next line
        if step >= self._last_step:
            self._hurry.set()
        return self._warned

    def _on_warning(self, *_: object) -> None:
        self._warned = True

    def _meet(self, fault: InjectedFault) -> float:
        """The time that all victims of this step have agreed upon."""
        key = f"fault {fault.step}"
        if self._store.add(f"{key} victims", 1) == len(self._together):
            self._store.set(f"{key} due", str(time.monotonic() + self._offset))
        return float(self._store.get(f"{key} due"))

    def _strike(self, fault: InjectedFault, due: float) -> None:
        self._hurry.wait(max(0.0, due - time.monotonic()))
        self._announce(Striking(due, time.monotonic()))
        os.kill(os.getpid(), _SIGNALS[fault.kind])

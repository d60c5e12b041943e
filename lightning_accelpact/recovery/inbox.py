"""The notices that have reached this rank: written by the monitor thread, obeyed by the main thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_accelpact.recovery.control import Notice, Superseded
from lightning_accelpact.recovery.line import Line


class Inbox:
    """What this rank has been told, and what it is waiting for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: tuple[int, Callable[[Line], object]] | None = None
        self.latest: Notice | None = None
        self.generation = 0  # the newest repair that has been called
        self.stop: Notice | None = None
        self.control_lost = ""

    def take(self, notice: Notice, store: Line) -> None:
        """A notice has come: end what the main thread waits for, if that belongs to an older repair, or all is to stop.

        Args:
            notice: The notice.
            store: The monitor's own connection.
        """
        with self._lock:  # the monitor may bring one while a run that begins takes in the latest one
            if notice.generation >= self.generation:
                self.latest, self.generation = notice, notice.generation
            self.stop = notice if notice.stop else self.stop
        waiting = self._waiting
        # Whoever stops has not answered in a repair of the same generation, and never will
        if waiting is not None and (notice.stop or waiting[0] < notice.generation):
            waiting[1](store)

    @contextmanager
    def interruptible(self, generation: int, end: Callable[[Line], object]) -> Iterator[None]:
        """Let a notice newer than ``generation`` end what this rank waits for.

        Args:
            generation: The repair that the wait belongs to.
            end: Settles what is waited for, on the monitor's store.

        Raises:
            Superseded: if a newer repair, or the end of the run, has been called already.
        """
        self._waiting = (generation, end)  # before the look at the latest notice, so that none slips between
        try:
            if self.generation > generation or self.stop is not None:
                raise Superseded(f"rank {self.latest.rank} has called repair {self.latest.generation}: {self.latest.reason}")
            yield
        finally:
            self._waiting = None

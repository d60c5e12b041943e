"""One update given as a function: run, and run again from memory if a fault strikes inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning_accelpact.recovery.action import Phase
from lightning_accelpact.recovery.fault import FaultPoint
from lightning_accelpact.recovery.machine import RepairMachine, UpdateAborted
from lightning_accelpact.recovery.window import Window

T = TypeVar("T")


class UpdateRunner:
    """Runs updates for loops that are the user's own.

    Args:
        machine: Guards and repairs.
        window: Captures what an update changes besides gradients.
        drop_gradients: Clears every gradient.
    """

    def __init__(self, machine: RepairMachine, window: Window, drop_gradients: Callable[[], None]) -> None:
        self._machine = machine
        self._window = window
        self._drop_gradients = drop_gradients
        machine.on_redo = self._rewind

    @property
    def active(self) -> bool:
        """Whether an update is being run by :meth:`run`."""
        return self._machine.inside_update

    def run(self, update: Callable[[], T]) -> T:
        """Run one update: all its forward and backward passes, and one optimizer step at its end.

        Args:
            update: Does it; may be called several times, so it must take its batches from outside and draw random
                numbers from torch, Python or NumPy only. Nothing that communicates may follow the step in it.

        Returns:
            What ``update`` returned.

        Raises:
            FailStop: if a fault in it could not be repaired, or came after its step.
        """
        self._machine.poll()
        self._window.open()
        self._window.add(None)
        frontier = self._machine.progress.frontier
        while True:
            try:
                return self._attempt(update)
            except UpdateAborted:
                continue  # repaired inside the guard; the window is rewound
            except RuntimeError as error:
                if not self._machine.recovers(error):
                    raise
                failure = error
            if self._machine.progress.frontier > frontier:
                self._machine.stop_all(f"a fault after the step, inside the update's function: {failure}")
            self._machine.recover(failure)

    def _attempt(self, update: Callable[[], T]) -> T:
        machine = self._machine
        with machine.inside():
            self._window.pending[0].rng.restore()
            machine.enter(Phase.FORWARD)
            machine.faults.fire(FaultPoint.START)
            return update()

    def _rewind(self) -> None:
        self._machine.incidents[-1].redone_micro_batches += 1
        self._drop_gradients()
        self._window.rewind()

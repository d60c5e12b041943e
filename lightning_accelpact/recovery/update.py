"""One update given as a function: run, and run again from memory if a fault strikes inside it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_accelpact.recovery.action import Phase
from lightning_accelpact.recovery.fault import FaultPoint
from lightning_accelpact.recovery.machine import RepairMachine, UpdateAborted
from lightning_accelpact.recovery.window import Window

T = TypeVar("T")


class UpdateMisuse(Exception):
    """An update does what could not be run again exactly."""


def until_it_has_run(
    machine: RepairMachine,
    attempt: Callable[[], T],
    drop_gradients: Callable[[], None],
    before_repair: Callable[[RuntimeError], None] = lambda _: None,
) -> T:
    """Run a part of an update, and again each time that a fault in it has been repaired.

    Args:
        machine: Guards and repairs; its limit of repairs per update bounds this.
        attempt: Does it, from wherever the window stands.
        drop_gradients: Clears every gradient.
        before_repair: Given a communication fault that has ended an attempt; raises if it must not be repaired.

    Returns:
        What ``attempt`` returned.

    Raises:
        FailStop: if a fault could not be repaired, or came after the update had been applied: it would be applied twice.
    """
    committed = machine.progress.frontier
    while True:
        try:
            with machine.inside():
                return attempt()
        except UpdateAborted:  # repaired further inside; the window is rewound
            _refuse_if_applied(machine, committed, "a repair")
            machine.unwound()
            drop_gradients()
            continue
        except RuntimeError as error:
            if not machine.recovers(error):
                raise
            failure = error
        _refuse_if_applied(machine, committed, failure)
        before_repair(failure)
        machine.recover(failure, unwound=True)


def _refuse_if_applied(machine: RepairMachine, committed: int, failure: Any) -> None:
    if machine.progress.frontier != committed:
        machine.stop.everywhere(f"a fault after the optimizer's step, inside optimizer_step(): {failure}")


class UpdateRunner:
    """Runs updates for loops that are the user's own.

    Args:
        machine: Guards and repairs.
        window: Captures what an update changes besides gradients.
        drop_gradients: Clears every gradient.
        holds_gradients: Whether there are any.
        after_update: Called when an update has been applied, between it and the next one.
    """

    def __init__(
        self,
        machine: RepairMachine,
        window: Window,
        *,
        drop_gradients: Callable[[], None],
        holds_gradients: Callable[[], bool],
        after_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._machine = machine
        self._window = window
        self._drop_gradients = drop_gradients
        self._holds_gradients = holds_gradients
        self._after_update = after_update
        self._began = 0.0
        self._micro_batches = 0
        machine.on_redo = self._rewind

    @property
    def active(self) -> bool:
        """Whether an update is being run by :meth:`run`."""
        return self._machine.inside_update

    def run(self, update: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run one update: all its forward and backward passes, and the optimizer steps at its end.

        It begins without gradients. The vote comes before the first step and the frontier moves when ``update`` returns,
        so several optimizers may step in it. Without a step it is an update that was skipped, on all ranks alike.

        Args:
            update: Does it; may be called several times, so it must take its batches from outside and draw random
                numbers from torch, Python or NumPy only. Nothing that communicates may follow the first step in it.
            args: What it is called with, such as the batches. Not run again if it has written to their tensors in place.
            kwargs: Likewise.

        Returns:
            What ``update`` returned.

        Raises:
            FailStop: if a fault in it could not be repaired, or came after its first step.
            UpdateMisuse: if it goes on computing after a step, or leaves gradients for a later update.
        """
        self._machine.poll()
        self._drop_gradients()  # what came before the window could not be brought back
        self._window.open()
        self._window.add((args, kwargs))
        result = until_it_has_run(
            self._machine,
            lambda: self._attempt(lambda: update(*args, **kwargs)),
            self._drop_gradients,
            self._refuse_after_a_step,
        )
        self._machine.stepped()
        self._after_update()
        return result

    def _refuse_after_a_step(self, failure: RuntimeError) -> None:
        if self._stepping:
            self._machine.stop.everywhere(f"a fault after the first step, inside the update's function: {failure}")

    def _attempt(self, update: Callable[[], T]) -> T:
        machine = self._machine
        self._began, self._micro_batches = time.time(), 1
        self._window.begin()
        machine.enter(Phase.FORWARD)
        machine.faults.fire(FaultPoint.START)
        result = update()
        if not self._stepping:
            self._skip()
        return result

    def _skip(self) -> None:
        """Agree with all ranks that nothing is to be written in this update."""
        if self._holds_gradients():
            raise UpdateMisuse(
                "run_update(function) returned without an optimizer step, but left gradients: one function must hold all"
                " micro-batches of an update and its step. To skip an update, clear them with optimizer.zero_grad()"
            )
        self._machine.vote()

    def enter(self, phase: Phase) -> None:
        """A forward or backward pass of the update begins.

        Raises:
            UpdateMisuse: if an optimizer has stepped.
        """
        progress = self._machine.progress
        if self._stepping:
            raise UpdateMisuse(
                f"run_update(function): a {phase.value} pass after an optimizer step could not be run again. Steps come"
                " last; give each group of losses and steps that follow one another a run_update() of its own"
            )
        if phase is Phase.FORWARD and progress.phase is Phase.BACKWARD:
            progress.micro_batch += 1
            self._micro_batches += 1
        self._machine.enter(phase)

    def vote(self) -> None:
        """An optimizer is about to write: vote on the update, unless another one has written in it."""
        if not self._stepping:
            self._machine.vote()

    @property
    def _stepping(self) -> bool:
        return self._machine.progress.phase is Phase.STEPPING

    def _rewind(self) -> None:
        incident = self._machine.incidents[-1]
        incident.redone_micro_batches += self._micro_batches
        incident.redo_s += max(0.0, incident.time - self._began)
        self._drop_gradients()
        self._window.rewind()


class VotingClosure:
    """A closure after which the optimizer writes.

    Args:
        closure: The user's.
        vote: Called right after it.
    """

    def __init__(self, closure: Callable[[], Any], vote: Callable[[], None]) -> None:
        self._closure = closure
        self._vote = vote
        self._called = False

    def __call__(self) -> Any:
        if self._called:
            raise UpdateMisuse("the optimizer calls its closure more than once in a step, but there is one vote on it")
        self._called = True
        result = self._closure()
        self._vote()
        return result

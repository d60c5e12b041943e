"""Updates in a loop of the user's own, which alone can run an iteration again.

A context manager can swallow a fault, but not run its body once more. So the prepared data loaders hand out the
update's batches again, and the loop goes through them as it did before. Ranks may have come to different iterations
when a fault is repaired; those that are behind go through theirs *idle*, that is, up to the first forward pass. So all
replays begin in the same iteration, and what the loop does in between it does on all ranks alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from accelerate_plugin.batches import Batches, Feed
from lightning_accelpact.recovery.action import Decision, Phase
from lightning_accelpact.recovery.contents import Marks
from lightning_accelpact.recovery.fault import FaultPoint
from lightning_accelpact.recovery.machine import RepairMachine, UpdateAborted
from lightning_accelpact.recovery.window import Participant, Snapshot


class Counters(Protocol):
    """Accelerate's own count of micro-batches."""

    step: int

    def hold_back(self) -> None:
        """Tell the loop that this iteration is not the last one of an update."""


class Iterations:
    """The iterations of one rank's loop, in updates.

    Args:
        machine: Guards and repairs.
        counters: Accelerate's.
        participants: Capture what an iteration changes besides gradients.
        drop_gradients: Clears every gradient.
        on_commit: Called when an update has been applied.
        weights: Marks what nobody but the optimizer may write to.
    """

    def __init__(
        self,
        machine: RepairMachine,
        counters: Counters,
        participants: list[Participant],
        *,
        drop_gradients: Callable[[], None],
        on_commit: Callable[[], None],
        weights: Callable[[], Marks] = Marks,
    ) -> None:
        self._machine = machine
        self._counters = counters
        self._drop_gradients = drop_gradients
        self._on_commit = on_commit
        self._batches = Batches(lambda: Snapshot.take(participants), weights)
        self._obstacle = ""
        self._idle_until = (0, 0)  # frontier, and the iteration of its update that is the last idle one
        self._first_step = 0  # Accelerate's count when the update began
        self._micro_batches = 0  # begun since the update, or its replay, began
        self._began: float | None = None
        self._spent = 0.0
        self._begins = False
        self.inside = False
        self.idle = False
        machine.on_agreed_redo = self._agree

    # -- what the loop does

    def hand_out(self, feed: Feed) -> Any:
        """The batch for the next iteration."""
        if not self._machine.inside_update:
            self._machine.poll()
        progress = self._machine.progress
        idle = self._idle_until[0] == progress.frontier and progress.iterations < self._idle_until[1]
        return self._batches.take(feed, idle=idle)

    @contextmanager
    def iteration(self) -> Iterator[bool]:
        """The body of an iteration; tells whether it is idle. Swallows a fault that is repaired.

        Raises:
            FailStop: if the fault could not be repaired.
        """
        self._enter()
        committed = self._machine.progress.frontier
        try:
            yield self.idle
        except UpdateAborted:
            self._unwound()
        except RuntimeError as error:
            if not self._machine.recovers(error):
                raise
            if self._machine.progress.frontier != committed or self._stepping:
                self._machine.stop.everywhere(f"a fault after the optimizer's step, inside accumulate(): {error}")
            self._machine.recover(error, unwound=True)
            self._unwound()
        else:
            if self._stepping:  # some optimizers have stepped, and the others do not
                self.commit()
        finally:
            self._leave()

    def _enter(self) -> None:
        machine, progress = self._machine, self._machine.progress
        if not self._batches.fed:
            self._obstacle = "no batch has come from a prepared data loader since the last accumulate()"
        if progress.iterations == 0:
            self._first_step = self._counters.step
        progress.iterations += 1
        self._batches.begin()
        self.idle = self._idle_until[0] == progress.frontier and progress.iterations <= self._idle_until[1]
        self.inside = machine.inside_update = True
        if not self.idle:
            progress.micro_batch = self._micro_batches
            self._micro_batches += 1
            self._begins = self._micro_batches == 1
            self._began = time.time()
            machine.enter(Phase.FORWARD)
        else:
            self._counters.hold_back()

    def _leave(self) -> None:
        self.inside = self._machine.inside_update = False
        idle, self.idle = self.idle, False
        self._stop_watch(time.time())
        if idle:
            self._replay_if_all_have_come()

    def enter(self, phase: Phase) -> None:
        """A forward or backward pass begins inside an iteration.

        Raises:
            UpdateAborted: if the iteration is idle.
        """
        if self.idle:
            raise UpdateAborted
        self._machine.enter(phase)
        if self._begins:
            self._begins = False
            self._machine.faults.fire(FaultPoint.START)

    def vote(self) -> None:
        """An optimizer is about to write: vote on the update, unless another one has written in it.

        Raises:
            UpdateAborted: if the update has to run again, or the iteration is idle.
        """
        if self.idle:
            raise UpdateAborted
        if not self._stepping:
            self._machine.vote()

    def vote_outside(self) -> bool:
        """Like :meth:`vote`, after the iteration's context; returns whether to step."""
        with self._machine.inside():
            try:
                self.vote()
            except UpdateAborted:
                self._unwound()
                return False
        return True

    def commit(self) -> None:
        """The optimizers have written; what follows in the iteration belongs to no update."""
        self._stop_watch(time.time())
        self.inside = self._machine.inside_update = False
        self._batches.forget()
        self._obstacle = ""
        self._micro_batches, self._spent = 0, 0.0
        self._machine.stepped()
        self._on_commit()

    @property
    def begun(self) -> bool:
        """Whether an update has begun."""
        return self._machine.progress.iterations > 0

    @property
    def _stepping(self) -> bool:
        return self._machine.progress.phase is Phase.STEPPING

    # -- when a fault has been repaired

    @property
    def obstacle(self) -> str:
        """Why the current update cannot be run again; empty if it can."""
        return self._obstacle or self._batches.obstacle

    @property
    def interrupted(self) -> bool:
        """Whether a fault has ended the current update, and it has not been applied since."""
        frontier, iteration = self._idle_until
        return iteration > 0 and frontier == self._machine.progress.frontier

    def redo(self) -> None:
        """The update of this rank is to run again: forget what it has computed."""
        incident = self._machine.incidents[-1]
        self._stop_watch(incident.time)
        incident.redone_micro_batches += self._micro_batches
        incident.redo_s += self._spent
        self._micro_batches, self._spent = 0, 0.0
        self._drop_gradients()

    def _agree(self, decision: Decision) -> None:
        """All ranks go on, idle, to the iteration that the furthest of them has come to."""
        self._idle_until = (decision.frontier, decision.iterations)
        self._replay_if_all_have_come()

    def _replay_if_all_have_come(self) -> None:
        progress = self._machine.progress
        if self.begun and (progress.frontier, progress.iterations) == self._idle_until:
            self._batches.rewind()
            self._counters.step = self._first_step

    def _unwound(self) -> None:
        self._machine.unwound()
        self._drop_gradients()
        self._counters.hold_back()

    def _stop_watch(self, now: float) -> None:
        if self._began is not None:
            self._spent += max(0.0, now - self._began)
        self._began = None

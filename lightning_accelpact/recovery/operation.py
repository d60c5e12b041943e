"""Operations outside an update, such as a barrier or a checkpoint: they count once every rank has finished them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lightning_accelpact.recovery.contents import overwrite
from lightning_accelpact.recovery.machine import RepairMachine

T = TypeVar("T")


class Operations:
    """Runs the operations of all ranks to their end, each with a number and a commit vote.

    A rank whose peers had not finished an operation runs it again with them after the repair. So nobody ever needs a
    result that only somebody else holds. Inside an update a failure is left to the update's window, and inside another
    operation to that one.

    Args:
        machine: Votes and repairs.
    """

    def __init__(self, machine: RepairMachine) -> None:
        self._machine = machine
        self._sequence = 0

    @property
    def running(self) -> bool:
        """Whether an operation is being run by :meth:`run`."""
        return self._machine.inside_operation

    def run(self, operation: Callable[[], T], *, rewind: Callable[[], None] = lambda: None) -> T:
        """Run an operation of all ranks.

        Args:
            operation: Does it; may be called several times.
            rewind: Undoes what an unfinished attempt has changed on this rank; called before the next one.

        Raises:
            FailStop: if a fault in it could not be repaired.
        """
        if self._machine.inside_update or self.running:
            return operation()
        self._sequence += 1
        self._machine.inside_operation = True
        try:
            return self._until_all_have_finished(operation, rewind)
        finally:
            self._machine.inside_operation = False

    def _until_all_have_finished(self, operation: Callable[[], T], rewind: Callable[[], None]) -> T:
        while True:
            failure: BaseException | None = None
            try:
                result = operation()
                if self._machine.confirm(self._sequence):
                    return result
            except RuntimeError as error:
                if not self._machine.recovers(error):
                    raise
                failure = error
            self._machine.recover(failure)
            self._machine.unwound()
            rewind()

    def run_in_place(self, tensor: torch.Tensor, operation: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Like :meth:`run`, for an operation that overwrites ``tensor``: its input is kept until it has succeeded."""
        kept = tensor.clone()
        return self.run(operation, rewind=lambda: overwrite(tensor, kept))

    def gather_json(self, message: Any) -> list[Any]:
        """One JSON value per rank on every rank, in rank order, over the control plane."""
        return self.run(lambda: self._machine.gather(message, self._sequence))

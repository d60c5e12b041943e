"""Collectives outside an update: repaired and run again until every rank has finished them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins.collectives import TorchCollective

from lightning_accelpact.recovery.machine import RepairMachine

T = TypeVar("T")


class ResilientCollective(TorchCollective):
    """Fabric's collective layer with a commit vote after each operation.

    An operation counts only once every rank has finished it; a rank whose peers had not finished runs it again with
    them. So nobody ever needs a result that only somebody else holds. Inside an update a failure is left to the
    update's own window, which runs its micro-batches again.

    Args:
        machine: Votes and repairs.
    """

    def __init__(self, machine: RepairMachine) -> None:
        super().__init__()
        self._machine = machine
        self._sequence = 0

    def run(self, operation: Callable[[], T]) -> T:
        """Run a collective operation of all ranks to its end.

        Args:
            operation: Issues it; may be called again, so it must not change its own input.

        Raises:
            FailStop: if a fault in it could not be repaired.
        """
        if self._machine.inside_update:
            return operation()
        self._sequence += 1
        while True:
            try:
                result = operation()
                if self._machine.confirm(self._sequence):
                    return result
                failure: BaseException | None = None
            except RuntimeError as error:
                if not self._machine.recovers(error):
                    raise
                failure = error
            self._machine.recover(failure)

    def gather_json(self, message: Any) -> list[Any]:
        """One JSON value per rank on every rank, over the control plane."""
        return self.run(lambda: self._machine.gather(message, self._sequence))

    def run_in_place(self, tensor: torch.Tensor, operation: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Like :meth:`run`, for an operation that overwrites ``tensor``: its input is kept until it has succeeded."""
        kept = tensor.clone()

        def attempt() -> torch.Tensor:
            tensor.copy_(kept)
            return operation()

        return self.run(attempt)

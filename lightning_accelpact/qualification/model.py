"""What probes train: a model of repeated blocks, small enough to take a second and with everything that a redo sets back."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_accelpact.recovery.fault import Fault

UPDATES = 5
MICRO_BATCHES = 2
WIDTH, BATCH = 8, 4


class Block(nn.Module):
    """A layer with dropout and BatchNorm: generators and buffers have to be set back, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


def blocks() -> nn.Sequential:
    """The model, with the same weights whenever it is made."""
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(3)))


def batches(rank: int, count: int = UPDATES * MICRO_BATCHES) -> list[Tensor]:
    """The data of one rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randn(BATCH, WIDTH, generator=generator) for _ in range(count)]


class Trained(Protocol):
    """Trains the model under one framework, on every rank of a world.

    There is a barrier after each update, so that nobody has begun the next one when a fault strikes before it.

    Args:
        faults: Strike on the way.
        options: Of the strategy or plugin, besides ``envelope="off"``.
        accelerator: ``cpu`` or ``gpu``, as Lightning names them.
        backend: Of the training groups.

    Returns:
        The digest of this rank's weights and optimizer state, and its incidents.
    """

    def __call__(
        self, faults: list[Fault], options: dict[str, Any], accelerator: str, backend: str
    ) -> tuple[str, list[dict[str, Any]]]: ...

"""Train loaders of the kinds that Lightning knows, each of 8 batches of 4 samples per rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
from jobs import Samples
from torch.utils.data import DataLoader, IterableDataset, Subset

BATCHES = 8  # per epoch and rank


def _ranks() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def shuffled(batches: int = BATCHES, **options: Any) -> DataLoader:
    """The usual one; Lightning gives every rank its part."""
    return DataLoader(Subset(Samples(), range(4 * batches * _ranks()[1])), batch_size=4, shuffle=True, **options)


class Stream(IterableDataset):
    """Draws samples, and noise upon them, from the global generator; its length is not known."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        samples, (rank, ranks) = Samples(), _ranks()
        for _ in range(4 * BATCHES):
            number = int(torch.randint(len(samples) // ranks, ())) * ranks + rank
            inputs, targets = samples[number]
            yield inputs + 0.01 * torch.rand(16), targets


class WithState:
    """A loader of one's own that a checkpoint takes to where it was; notes the (epoch, position) of what it gave."""

    def __init__(self) -> None:
        self.epoch = self.position = 0
        self.given: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        samples, (rank, ranks) = Samples(), _ranks()
        if self.position == BATCHES:
            self.epoch, self.position = self.epoch + 1, 0
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(self.epoch))
        while self.position < BATCHES:
            begin = 4 * (self.position * ranks + rank)
            self.given.append((self.epoch, self.position))
            self.position += 1
            yield samples[order[begin : begin + 4]]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


def several(**options: Any) -> dict[str, DataLoader]:
    """Two in step; the shorter one starts over."""
    return {"long": shuffled(**options), "short": shuffled(3, **options)}


def make(kind: str, **options: Any) -> Any:
    """A loader, or several, by the name of its kind."""
    if kind == "stream":
        return DataLoader(Stream(), batch_size=4, **options)
    if kind == "with state":
        return WithState()
    return {"shuffled": shuffled, "several": several}[kind](**options)


def joined(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs and targets of a batch, or of one from each of several loaders."""
    if not isinstance(batch, dict):
        return batch
    inputs, targets = zip(*batch.values(), strict=True)
    return torch.cat(inputs), torch.cat(targets)

"""The training that is measured: a model of equal blocks under Lightning and the real strategy."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.recovery.fault import Fault, FaultPlan
from lightning_accelpact.strategy import ResilientHSDPStrategy

_INPUTS, _OUTPUTS = 16, 4


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What every rank trains.

    Args:
        updates: Optimizer steps.
        layers: Repeated blocks, each sharded as a unit; the root comes on top.
        width: Features of a block.
        batch: Samples of one rank in an update.

    Raises:
        ValueError: if a size is below its minimum.
    """

    updates: int
    layers: int
    width: int
    batch: int = 4

    def __post_init__(self) -> None:
        for name, least in (("updates", 1), ("layers", 2), ("width", 1), ("batch", 2)):  # BatchNorm needs two samples
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


class Batches(Dataset):
    """Random batches; an index always gives the same one.

    Args:
        number: How many there are.
        size: Samples in each.
    """

    def __init__(self, number: int, size: int) -> None:
        self._number, self._size = number, size

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(self._size, _INPUTS, generator=draw), torch.randn(self._size, _OUTPUTS, generator=draw)


class Block(nn.Module):
    """A residual layer with dropout and BatchNorm, so that generators and three buffers are part of the window."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Regressor(pl.LightningModule):
    """Blocks under AdamW; random data, since only the time matters."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width = workload.width
        self.workload = workload
        self.embed = nn.Linear(_INPUTS, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(workload.layers)))
        self.head = nn.Linear(width, _OUTPUTS)

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.head(self.blocks(self.embed(inputs))), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=True)

    def train_dataloader(self) -> DataLoader:
        workload = self.workload
        return DataLoader(Batches(workload.updates * self.trainer.world_size, workload.batch), batch_size=None)


def fit(
    workload: Workload,
    *,
    faults: Iterable[Fault] = (),
    callbacks: Iterable[pl.Callback] = (),
    uncommitted: str = "retry",
) -> pl.Trainer:
    """Train on this rank and return the trainer; the strategy keeps the incidents.

    Args:
        workload: What to train.
        faults: Strike on the way.
        callbacks: Besides the goodput accounting that every run has.
        uncommitted: The strategy's option: what a fault inside an update is answered with.
    """
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric", "accelpact"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl.seed_everything(1, verbose=False)
    trainer = _trainer(workload, FaultPlan(faults), list(callbacks), uncommitted)
    trainer.fit(Regressor(workload))
    return trainer


def _trainer(workload: Workload, faults: FaultPlan, callbacks: list[pl.Callback], uncommitted: Any) -> pl.Trainer:
    options: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=ResilientHSDPStrategy(
            collective_timeout=60,
            repair_budget=120,
            uncommitted=uncommitted,
            faults=faults,
            goodput=GoodputCallback(print_summary=False),
        ),
        max_steps=workload.updates,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        **options,
    )

"""The probes' training under Lightning's Trainer."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accelpact.fsdp1_strategy import ResilientFSDP1Strategy
from lightning_accelpact.qualification.model import BATCH, MICRO_BATCHES, UPDATES, batches, blocks
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan
from lightning_accelpact.strategy import ResilientHSDPStrategy, ResilientTraining


class _Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        if (batch_idx + 1) % MICRO_BATCHES == 0:
            self.trainer.strategy.barrier()  # so that nobody has begun the next update when a fault strikes before it

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader:
        world = self.trainer.world_size
        return DataLoader(torch.cat([torch.cat(batches(rank)) for rank in range(world)]), batch_size=BATCH)


def train(
    faults: list[Fault], options: dict[str, Any], accelerator: str, backend: str
) -> tuple[str, list[dict[str, Any]]]:
    """Train, and say where this rank has ended and what happened on the way."""
    return _train(ResilientHSDPStrategy, faults, {"process_group_backend": backend, **options}, accelerator)


def train_fsdp1(
    faults: list[Fault], options: dict[str, Any], accelerator: str, backend: str
) -> tuple[str, list[dict[str, Any]]]:
    """The same with FSDP1."""
    # Of two ranks it would make two replicas otherwise, and FSDP1 needs shards
    return _train(ResilientFSDP1Strategy, faults, {"process_group_backend": backend, "shard": 2, **options}, accelerator)


def _train(
    strategy_class: type[ResilientTraining], faults: list[Fault], options: dict[str, Any], accelerator: str
) -> tuple[str, list[dict[str, Any]]]:
    strategy = strategy_class(faults=FaultPlan(faults), goodput=False, envelope="off", **options)
    module = _Module()
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_steps=UPDATES,
        accumulate_grad_batches=MICRO_BATCHES,
        **quiet,
    )
    trainer.fit(module)
    return state_digest(module, trainer.optimizers), [incident.to_dict() for incident in strategy.incidents]

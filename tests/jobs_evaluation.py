"""A validation with faults in many of its steps, or with many in one."""

from __future__ import annotations

import os
from collections import Counter

import lightning.pytorch as pl
import torch
from jobs import Regressor, Samples
from torch.utils.data import DataLoader

from lightning_accelpact.recovery.communicator import CommunicatorLost
from lightning_accelpact.strategy import ResilientHSDPStrategy

FAULTS: Counter[int] = Counter()  # that rank 1 is still to meet, by the number of the step; nothing sets it back


class Faulty(Regressor):
    """Its validation meets faults."""

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("loss", torch.nn.functional.mse_loss(self(inputs), targets))
        if self.global_rank == 1 and FAULTS[batch_idx]:
            FAULTS[batch_idx] -= 1
            raise CommunicatorLost(f"in step {batch_idx}")


def validate(faults: dict[int, int], max_repairs: int) -> dict[str, float]:
    """What a validation of 6 steps gives."""
    pl.seed_everything(11, workers=True, verbose=False)
    FAULTS.update(faults)
    strategy = ResilientHSDPStrategy(
        goodput=False, collective_timeout=30.0, repair_budget=60.0, max_repairs_per_update=max_repairs
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    (result,) = trainer.validate(Faulty(layers=2), DataLoader(Samples(48), batch_size=4), verbose=False)
    return {**result, "incidents": len(strategy.incidents)}

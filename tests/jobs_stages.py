"""One module through all that a Trainer does, one after the other."""

from __future__ import annotations

import inspect
import os
from typing import Any

import lightning.pytorch as pl
import torch
from jobs import Regressor, Samples
from torch.utils.data import DataLoader

from lightning_accelpact.strategy import ResilientHSDPStrategy


class Staged(Regressor):
    """Has a step for everything."""

    def test_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        inputs, targets = batch
        self.log("loss", torch.nn.functional.mse_loss(self(inputs), targets))

    def predict_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self(batch[0])


def stages() -> dict[str, Any]:
    """Fit, test, predict, fit again, and what the steps look like then."""
    pl.seed_everything(11, workers=True, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), logger=False, max_steps=2,
        strategy=ResilientHSDPStrategy(goodput=False, collective_timeout=30.0, repair_budget=60.0),
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module, loader = Staged(layers=2), DataLoader(Samples(16), batch_size=4)
    trainer.fit(module)
    size = os.environ["WORLD_SIZE"] = str(trainer.world_size)  # Lightning's environment takes it away after each run
    trainer.test(module, loader, verbose=False)
    os.environ["WORLD_SIZE"] = size
    predictions = trainer.predict(module, loader)
    os.environ["WORLD_SIZE"] = size
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(module)
    return {
        "predictions": len(predictions),
        "steps": trainer.global_step,
        "arguments": [*inspect.signature(module.predict_step).parameters],
    }

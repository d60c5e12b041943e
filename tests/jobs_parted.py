"""A run whose ranks do not do the same."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from jobs import Regressor

from lightning_accelpact.strategy import ResilientHSDPStrategy


class EarlyOnOneRank(pl.Callback):
    """Rank 1 is content after two updates, and tells nobody."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_rank == 1 and trainer.global_step == 2


def fit() -> None:
    """Short timeouts, since nothing but a timeout tells that a rank does not come."""
    strategy = ResilientHSDPStrategy(
        goodput=False, collective_timeout=4.0, repair_budget=30.0, rebuild_timeout=3.0, heartbeat_deadline=3.0
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=4, logger=False,
        callbacks=[EarlyOnOneRank()], enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Regressor(layers=2))

"""A fit that is stopped, killed and started again; a script for a launcher, and a job for the warm ranks.

Usage: python restarted.py FOLDER ATTEMPT...: each attempt says how it ends, as ``stop@16``: with a fail-stop in the
update after 16; ``kill@19:1``: rank 1 is killed after update 19; ``write@4:2``: rank 2 while it writes the checkpoint of
update 4; ``-``: not before its time. Each rank writes what it has
seen to a file in the folder.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from jobs import Regressor, Samples
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Subset
from torchmetrics import MeanMetric

from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import FaultPlan
from lightning_accelpact.strategy import ResilientHSDPStrategy

EVERY, UPDATES = 13, 28  # checkpoints; the end
PER_EPOCH = 6  # updates; so update 13 is the first of the third epoch


class Drawing(Regressor):
    """Draws from every generator, and keeps a metric over the epoch."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__(layers=2, width=16)
        self.mean = MeanMetric()
        self.workers = workers

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean.update(loss.detach())
        return loss * (1 + 0.1 * random.random() + 0.1 * numpy.random.rand())

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        torch.rand(())
        self.log("val", self.forward(batch[0]).mean(), sync_dist=True)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(
            Subset(Samples(), range(4 * 4 * 2 * PER_EPOCH)), batch_size=4, shuffle=True, num_workers=self.workers
        )

    def val_dataloader(self) -> DataLoader:
        return DataLoader(Subset(Samples(), range(16)), batch_size=4)


class Trace(pl.Callback):
    """What a rank holds after every update, and how it ends."""

    def __init__(self, ends: str) -> None:
        self.seen: dict[int, str] = {}
        self.first: int | None = None
        kind, _, place = ends.partition("@")
        update, _, rank = place.partition(":")
        self._kill = (int(update), int(rank)) if kind == "kill" else None

    def on_train_batch_end(self, trainer: pl.Trainer, module: Drawing, *args: Any) -> None:
        if self.first is None:
            self.first = trainer.global_step
        if trainer.fit_loop._should_accumulate():
            return
        mean = f"{module.mean.compute().item():.9g}"
        self.seen[trainer.global_step] = f"{state_digest(module, trainer.optimizers)} {mean}"
        if (trainer.global_step, trainer.global_rank) == self._kill:
            os.kill(os.getpid(), signal.SIGKILL)


def fit(
    folder: Path, ends: str = "-", *, every: int = EVERY, updates: int = UPDATES, workers: int = 0,
    trainer_options: dict[str, Any] | None = None, checkpoint_options: dict[str, Any] | None = None,
    **strategy_options: Any,
) -> dict[str, Any]:  # fmt: skip
    """One attempt."""
    pl.seed_everything(11, workers=True, verbose=False)
    module, trace = Drawing(workers), Trace(ends)
    faults = [f"backward@{ends.partition('@')[2]}:1"] if ends.startswith("stop") else []
    strategy = ResilientHSDPStrategy(
        **{"faults": FaultPlan.parse(faults), "uncommitted": "restart", "collective_timeout": 30.0,
           "repair_budget": 60.0, "goodput": GoodputCallback(print_summary=True), **strategy_options}
    )  # fmt: skip
    saves = ModelCheckpoint(
        **{"dirpath": folder / "checkpoints", "filename": "{step}", "every_n_train_steps": every, "save_top_k": -1,
           **(checkpoint_options or {})}
    )  # fmt: skip
    trainer = pl.Trainer(
        **{"accelerator": "cpu", "devices": int(os.environ.get("WORLD_SIZE", "4")), "strategy": strategy,
           "max_steps": updates, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "logger": False,
           "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
           "num_sanity_val_steps": 1, "callbacks": [trace, saves], **(trainer_options or {})}
    )  # fmt: skip
    result: dict[str, Any] = {"ends": ends, "seen": trace.seen}
    if ends.startswith("write"):
        _die_writing(trainer, *map(int, ends.partition("@")[2].split(":")))
    try:
        trainer.fit(module)
    finally:
        result |= {
            "step": trainer.global_step,
            "first": trace.first,
            "after": _what_else(trainer),
            "summary": strategy._goodput.summary.to_dict() if strategy._goodput.summary else None,
        }
        _keep(folder, result)
    return result


def _what_else(trainer: pl.Trainer) -> dict[str, Any]:
    """What the run has come to besides weights and optimizer."""
    fit = trainer.fit_loop
    return {
        "epoch": trainer.current_epoch,
        "batches": fit.epoch_loop.batch_progress.state_dict(),
        "stepped": fit.epoch_loop._batches_that_stepped,
        "metrics": {name: value.item() for name, value in sorted(trainer.callback_metrics.items())},
        "rates": [config.scheduler.state_dict()["_last_lr"] for config in trainer.lr_scheduler_configs],
        "random": torch.get_rng_state().sum().item(),
    }


def _die_writing(trainer: pl.Trainer, update: int, rank: int) -> None:
    save = torch.save

    def die(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if (trainer.global_step, getattr(path, "name", "")) == (update, f"accelpact-rank{rank}.pt"):
            path.write_bytes(b"PK")
            os.kill(os.getpid(), signal.SIGKILL)
        save(value, path, *args, **kwargs)

    torch.save = die


def _keep(folder: Path, result: dict[str, Any]) -> None:
    with (folder / f"rank{os.environ.get('RANK', '0')}.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")


def fit_with(folder: Path, ends: str, options: dict[str, Any]) -> dict[str, Any]:
    """:func:`fit` with its options in one dictionary."""
    return fit(folder, ends, **options)


def main(folder: Path, attempts: list[str]) -> None:
    begun = folder / f"begun-rank{os.environ['RANK']}"
    with begun.open("a") as file:
        file.write("x")
    fit(folder, attempts[begun.stat().st_size - 1])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

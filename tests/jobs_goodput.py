"""What the ranks of a test do: two attempts at one run, the first of which is killed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jobs import Regressor

from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.recovery.fault import FaultPlan
from lightning_accelpact.strategy import ResilientHSDPStrategy

STEP_S = 0.08


class Slow(Regressor):
    """Takes its time, so that there is something to account for."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        time.sleep(STEP_S)
        return super().training_step(batch, batch_idx)


class Saves(pl.Callback):
    """Writes a checkpoint once an update is committed."""

    def __init__(self, path: Path, update: int) -> None:
        self.path, self.update = path, update

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.update:
            self.update = -1
            trainer.save_checkpoint(self.path)


class Dies(pl.Callback):
    """Waits to be killed after the first micro-batch after an update; the file says who is waiting."""

    def __init__(self, update: int, waits: Path) -> None:
        self.update, self.waits = update, waits

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == self.update and args[-1] % 2 == 0:
            self.waits.with_suffix(".part").write_text(str(os.getpid()))
            self.waits.with_suffix(".part").rename(self.waits)
            time.sleep(60)
            raise TimeoutError("not killed within 60 s")


class Notes(pl.Callback):
    """Writes down when an update is committed."""

    def __init__(self, path: Path, update: int) -> None:
        self.path, self.update = path, update

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.update:
            note(self.path)


def attempt(
    folder: Path, faults: list[str], *, updates: int, save: int = -1, die: int = -1, resume: bool = False
) -> dict[str, Any]:
    """One attempt; says what it committed, and writes down when it begins, commits its last update and ends."""
    moments = folder / f"moments-{os.environ['RANK']}.txt"
    note(moments)
    pl.seed_everything(11, workers=True, verbose=False)
    checkpoint = folder / "last.ckpt"
    strategy = ResilientHSDPStrategy(
        faults=FaultPlan.parse(faults), uncommitted="redo", collective_timeout=30.0, repair_budget=60.0,
        goodput=GoodputCallback(log_dir=folder / "log", metrics_dir=folder / "metrics", print_summary=False),
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=updates,
        accumulate_grad_batches=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Saves(checkpoint, save), Dies(die, folder / f"waits-{os.environ['RANK']}"), Notes(moments, updates)],
    )  # fmt: skip
    trainer.fit(Slow(), ckpt_path=checkpoint if resume else None)
    note(moments)
    return {"updates": trainer.global_step, "incidents": len(strategy.incidents)}


def note(path: Path) -> None:
    """Append the Unix time."""
    with path.open("a") as file:
        file.write(f"{time.time()}\n")


def attempt_with(folder: Path, faults: list[str], options: dict[str, Any]) -> dict[str, Any]:
    """:func:`attempt` with its options in one dictionary."""
    return attempt(folder, faults, **options)

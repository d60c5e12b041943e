"""What the ranks of a test do: a fit in which one of them is told by its supervisor to end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from jobs import Regressor
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data import DataLoader

from lightning_accelpact.recovery.fault import Fault, FaultPlan
from lightning_accelpact.strategy import ResilientHSDPStrategy


class Terminated(pl.Callback):
    """Sends SIGTERM to this process, once.

    Args:
        rank: Which rank gets it; ``None`` for all.
        batch: In which micro-batch.
        hook: In which of its hooks.
    """

    def __init__(self, rank: int | None, batch: int, hook: str) -> None:
        self.sent_at = 0.0
        here = rank is None or rank == int(os.environ["RANK"])
        setattr(self, hook, lambda *args, **_: self._send() if here and args[-1] == batch else None)

    def _send(self) -> None:
        self.sent_at = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)


class Validated(Regressor):
    """Also validates."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.forward(batch[0]).mean(), sync_dist=True)

    def val_dataloader(self) -> DataLoader:
        return self.train_dataloader()


class Counted(pl.Callback):
    """Counts validation batches."""

    def __init__(self) -> None:
        self.batches = 0

    def on_validation_batch_end(self, *_: Any) -> None:
        self.batches += 1


class LateVoter(pl.Callback):
    """One rank opens the first ballot on an update only when it knows of a repair.

    Args:
        rank: Which.
        update: Which update, counted from 0.
    """

    def __init__(self, rank: int, update: int) -> None:
        self._late = rank == int(os.environ["RANK"])
        self._update = update

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        machine = trainer.strategy.machine
        opened = machine.guard.open

        def open_late(generation: int) -> str:
            until = time.monotonic() + 10
            waits = self._late and generation == 0 and machine.progress.frontier == self._update
            while waits and not machine.pending and time.monotonic() < until:
                time.sleep(0.001)
            return opened(generation)

        machine.guard.open = open_late


def fit(
    rank: int | None,
    batch: int,
    hook: str,
    faults: list[Fault] | None = None,
    accumulate: int = 2,
    late_voter: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Train until the signal ends it; says where this rank stood then, and how long that took."""
    module, terminated = Validated(), Terminated(rank, batch, hook)
    callbacks = [terminated] if late_voter is None else [terminated, LateVoter(*late_voter)]
    trainer = _trainer(
        callbacks, faults, max_epochs=1, accumulate_grad_batches=accumulate, limit_train_batches=12,
        val_check_interval=6, num_sanity_val_steps=0,
    )  # fmt: skip
    ended = _ended(lambda: trainer.fit(module))
    return {
        "ended": ended,
        "updates": trainer.strategy.committed_updates,
        "seconds": time.monotonic() - terminated.sent_at if terminated.sent_at else 0.0,
        "incidents": [incident.to_dict() for incident in trainer.strategy.incidents],
    }


def fit_with(options: dict[str, Any]) -> dict[str, Any]:
    """:func:`fit` with its options in one dictionary."""
    return fit(**options)


def validate_with(options: dict[str, Any]) -> dict[str, Any]:
    """Evaluate until the signal ends it; says after how many batches."""
    counted = Counted()
    trainer = _trainer([Terminated(**options), counted])
    return {"ended": _ended(lambda: trainer.validate(Validated(), verbose=False)), "batches": counted.batches}


def fit_to_the_end_of_the_process(options: dict[str, Any]) -> None:
    """Like a user's script: the exception ends the process."""
    _trainer([Terminated(**options)], max_epochs=1).fit(Regressor())


def _trainer(callbacks: list[pl.Callback], faults: list[Fault] | None = None, **options: Any) -> pl.Trainer:
    pl.seed_everything(11, workers=True, verbose=False)
    strategy = ResilientHSDPStrategy(
        faults=FaultPlan(faults or ()), goodput=False, collective_timeout=30.0, repair_budget=60.0
    )
    return pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, logger=False, limit_val_batches=3,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
        **options,
    )  # fmt: skip


def _ended(run: Callable[[], Any]) -> str:
    try:
        run()
    except SIGTERMException as end:
        return f"SIGTERMException {end.code}"
    return ""

"""A model and a strategy whose time comes from a clock that stands still until they move it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader, Dataset

from lightning_accelpact.callback import GoodputCallback
from lightning_accelpact.goodput import Ledger, TimeClass
from lightning_accelpact.recovery.incident import Incident


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Data(Dataset):
    """Four samples; each takes 0.5 s to load."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.clock.wait(0.5)
        return torch.ones(2)


class Model(LightningModule):
    """Waits in setup (1 s), before training (2 s), in each training or validation step (8 s or 4 s), and after a
    validation (0.25 s)."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.layer = torch.nn.Linear(2, 1)
        self.steps = 0

    def setup(self, stage: str) -> None:
        self.clock.wait(1)

    def on_fit_start(self) -> None:
        self.clock.wait(2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.clock.wait(8)
        self.steps += 1
        loss = self.layer(batch).sum()
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.clock.wait(4)

    def on_validation_end(self) -> None:
        self.clock.wait(0.25)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Strategy(SingleDeviceStrategy):
    """One process with what the callback looks for in a resilient strategy."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(device="cpu")
        self.ledger = Ledger(clock)
        self.incidents: list[Incident] = []

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.ledger.span(TimeClass.CHECKPOINT_SAVE):
            self.ledger._clock.wait(16)
            super().save_checkpoint(*args, **kwargs)


def trainer_for(strategy: Any, *callbacks: Any, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
        "enable_progress_bar": False,
    }
    return Trainer(strategy=strategy, callbacks=list(callbacks), **{**defaults, **options})


def loader(model: Model) -> DataLoader:
    return DataLoader(Data(model.clock), batch_size=1)


def fault(strategy: Strategy, frontier: int, **changes: Any) -> Incident:
    incident = Incident(
        rank=0, number=len(strategy.incidents) + 1, generation=len(strategy.incidents) + 1, time=time.time(),
        source="exception", reason="RuntimeError: connection reset", phase="backward", frontier=frontier,
        action="redo", verb="redo", outcome="recovered", total_s=0.03, redone_micro_batches=1,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(incident, name, value)
    strategy.incidents.append(incident)
    return incident


def nonzero(callback: GoodputCallback) -> dict[TimeClass, float]:
    assert callback.summary is not None
    return {cls: seconds for cls, seconds in callback.summary.totals.items() if seconds}


class FaultyModel(Model):
    """Has an incident in the training steps named."""

    def __init__(self, clock: Clock, *steps: int) -> None:
        super().__init__(clock)
        self.faults = steps

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        for _ in range(self.faults.count(self.trainer.global_step)):
            fault(self.trainer.strategy, self.trainer.global_step)
        return super().training_step(batch, batch_idx)


@pytest.fixture(autouse=True)
def startup_is_counted_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GoodputCallback, "_startup_counted", True)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def model(clock: Clock) -> Model:
    return Model(clock)


@pytest.fixture
def strategy(clock: Clock) -> Strategy:
    return Strategy(clock)

"""Modules whose steps and hooks change more than gradients."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from jobs import Block, Regressor

from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import FaultPlan
from lightning_accelpact.strategy import ResilientHSDPStrategy


class OwnNoiseAndRate(Regressor):
    """Draws from a generator of its own, and lowers the rate by hand."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.noise = torch.Generator().manual_seed(5)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        for group in self.optimizers().param_groups:
            group["lr"] *= 0.9
        noise = torch.randn(inputs.shape, generator=self.noise)
        return torch.nn.functional.mse_loss(self(inputs + noise), targets)


class Average:
    """A moving average, in an object that is no module."""

    def __init__(self) -> None:
        self.steps = 0
        self.weights = [torch.ones(1)]

    def update(self, value: torch.Tensor) -> None:
        self.steps += 1
        self.weights[0].lerp_(value.detach().reshape(1), 0.5)


class Averaged(Regressor):
    """Weighs its loss with an average that it has announced."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.average = Average()

    def on_fit_start(self) -> None:
        self.trainer.strategy.track(self.average)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.average.update(loss)
        return loss * self.average.steps * self.average.weights[0]


class Follower(Regressor):
    """Its first block follows the second one, as a teacher follows its student."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.blocks[0].requires_grad_(False)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            for follower, parameter in zip(self.blocks[0].parameters(), self.blocks[1].parameters(), strict=True):
                follower.lerp_(parameter, 0.1)
        return super().training_step(batch, batch_idx)


class FollowerOfAll(Follower):
    """The same with a list operation, which torch does not count as a write to a DTensor."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        with torch.no_grad():
            torch._foreach_lerp_(list(self.blocks[0].parameters()), list(self.blocks[1].parameters()), 0.1)
        return Regressor.training_step(self, batch, batch_idx)


class Taught(Regressor):
    """Has a teacher that follows it, beside the model."""

    def __init__(self) -> None:
        super().__init__(layers=2)
        self.beside = [torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))]

    def on_fit_start(self) -> None:
        self.trainer.strategy.track(*self.beside)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            for parameter in self.beside[0].parameters():
                parameter.lerp_(loss, 0.5)
        return loss * self.beside[0](loss.detach().expand(2, 1)).sum().detach().abs()


class Scaling(Regressor):
    """Scales its batch in a way that torch does not count as a write."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        batch[0].numpy()[:] *= 1.5
        return super().training_step(batch, batch_idx)


class Replacing(Follower):
    """Its first block gets new parameters."""

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        state = self.blocks[0].state_dict()
        self.blocks[0].load_state_dict({name: value * 0.9 for name, value in state.items()}, assign=True)
        return Regressor.training_step(self, batch, batch_idx)


def fit(module: type[Regressor], faults: list[str], uncommitted: str) -> dict[str, Any]:
    """Train a few updates; says where the model ended and how it was repaired."""
    pl.seed_everything(11, workers=True, verbose=False)
    strategy = ResilientHSDPStrategy(
        wrap={Block}, uncommitted=uncommitted, faults=FaultPlan.parse(faults), goodput=False, collective_timeout=30.0,
        repair_budget=60.0,
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, max_steps=4, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trained = module()
    trainer.fit(trained)
    return {
        "digest": state_digest(trained, trainer.optimizers),
        "verbs": [incident.verb for incident in strategy.incidents],
    }

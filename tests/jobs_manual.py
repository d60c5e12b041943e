"""What the ranks of a test do: manual optimization of an adversarial pair, whose end state is digested."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from jobs import Block, Samples
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan
from lightning_accelpact.strategy import ResilientHSDPStrategy


class Network(nn.Module):
    """A few blocks between two linear layers."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Pair(pl.LightningModule):
    """A generator and a critic, each with its optimizer; what steps when is up to ``manner``.

    Args:
        manner: ``apart``: one call of ``run_update`` for each; ``together``: one for both; ``accumulated``: like
            ``together``, over two halves of the batch; ``bare``: without ``run_update``.
    """

    def __init__(self, manner: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.manner = manner
        self.generator = Network(16, 4)
        self.critic = Network(4, 1)
        self.critic_loss = MeanMetric()
        self.generator_losses: list[float] = []
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        update = self.trainer.strategy.run_update
        if self.manner == "apart":
            update(self.train_critic, batch)
            update(self.train_generator, batch)
        elif self.manner == "bare":
            self.train_critic(batch)
            self.train_generator(batch)
        else:
            update(self.train_both, batch)
        for scheduler in self.lr_schedulers():
            scheduler.step()

    def train_critic(self, batch: Any) -> None:
        _, optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss_of_critic(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()

    def train_generator(self, batch: Any) -> None:
        optimizer, _ = self.optimizers()
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(self.loss_of_generator(batch))
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def train_both(self, batch: Any) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        halves = zip(*(tensor.chunk(2) for tensor in batch), strict=True)
        for part in [batch] if self.manner == "together" else halves:
            self.manual_backward(self.loss_of_critic(part) + self.loss_of_generator(part))
        for optimizer in optimizers:
            optimizer.step()

    def loss_of_critic(self, batch: Any) -> torch.Tensor:
        self.calls += 1
        inputs, targets = batch
        made = self.generator(inputs + torch.randn_like(inputs)).detach()
        loss = nn.functional.softplus(self.critic(made)).mean() + nn.functional.softplus(-self.critic(targets)).mean()
        self.critic_loss.update(loss.detach())
        self.log("critic", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def loss_of_generator(self, batch: Any) -> torch.Tensor:
        inputs, _ = batch
        loss = nn.functional.softplus(-self.critic(self.generator(inputs))).mean()
        self.generator_losses.append(loss.item())
        self.log("critic_mean", self.critic_loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2) for part in (self.generator, self.critic)]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9) for optimizer in optimizers]

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Samples(64), batch_size=4)


def fit(faults: list[Fault] | None = None, *, manner: str, batches: int = 3, **strategy_options: Any) -> dict[str, Any]:
    """Train the pair on this rank and describe where it ended."""
    pl.seed_everything(11, workers=True, verbose=False)
    module = Pair(manner)
    strategy = ResilientHSDPStrategy(
        **{"faults": FaultPlan(faults or ()), "goodput": False, "collective_timeout": 30.0, "repair_budget": 60.0,
           "manual_optimization": "update", **strategy_options}
    )  # fmt: skip
    trainer = pl.Trainer(
        accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy=strategy, limit_train_batches=batches,
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module)
    return {
        "compared": {
            "digest": state_digest(module, trainer.optimizers),
            "updates": strategy.committed_updates,
            "global_step": trainer.global_step,
            "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
            "rates": [optimizer.param_groups[0]["lr"] for optimizer in trainer.optimizers],
            "losses": module.generator_losses,
            "calls": module.calls,
        },
        "incidents": [incident.to_dict() for incident in strategy.incidents],
    }


def fit_with(options: dict[str, Any]) -> dict[str, Any]:
    """:func:`fit` with its options in one dictionary."""
    return fit(**options)

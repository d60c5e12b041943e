"""What the ranks of a test do: a small fit, with faults, whose end state is digested."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_accelpact.recovery.communicator import await_endings
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan
from lightning_accelpact.strategy import ResilientHSDPStrategy


class Samples(Dataset):
    """Fixed random regression data."""

    def __init__(self, size: int = 512) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(size, 16, generator=generator)
        self.targets = torch.randn(size, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class Block(nn.Module):
    """One repeated block, with dropout and BatchNorm so that generators and buffers matter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class Regressor(pl.LightningModule):
    """A few blocks under AdamW with an LR schedule."""

    def __init__(self, layers: int = 4, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.forward(inputs), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Samples(), batch_size=4, shuffle=True)


class Resources(pl.Callback):
    """Threads and open files after every update."""

    def __init__(self) -> None:
        self.samples: list[dict[str, int]] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.samples.append(self.sample())

    def settled(self) -> dict[str, int]:
        """Once retired groups have ended in the background; a wait that was given up holds one up for its whole timeout."""
        gc.collect()
        await_endings(60)
        return self.sample()

    def sample(self) -> dict[str, int]:
        return {
            "threads": len(os.listdir("/proc/self/task")),
            "files": len(os.listdir("/proc/self/fd")),
            "python_threads": threading.active_count(),
            "resident_kb": int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024,
        }


def fit(
    faults: list[Fault] | None = None,
    *,
    updates: int = 5,
    accumulate: int = 2,
    layers: int = 4,
    settle: bool = False,
    strategy_class: type = ResilientHSDPStrategy,
    trainer_options: dict[str, Any] | None = None,
    **strategy_options: Any,
) -> dict[str, Any]:
    """Train the regressor on this rank and describe where it ended; ``settle``: with what is left when all has settled."""
    pl.seed_everything(11, workers=True, verbose=False)
    module = Regressor(layers=layers)
    strategy = strategy_class(
        **{"faults": FaultPlan(faults or ()), "goodput": False, "collective_timeout": 30.0, "repair_budget": 60.0,
           **strategy_options}
    )  # fmt: skip
    resources = Resources()
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu", "devices": int(os.environ["WORLD_SIZE"]), "strategy": strategy,
            "max_steps": updates, "accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5, "logger": False,
            "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
            "callbacks": [resources], **(trainer_options or {}),
        }
    )  # fmt: skip
    trainer.fit(module)
    return {
        "digest": state_digest(module, trainer.optimizers),
        "updates": strategy.committed_updates,
        "global_step": trainer.global_step,
        "rate": trainer.optimizers[0].param_groups[0]["lr"],
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "incidents": [incident.to_dict() for incident in strategy.incidents],
        "resources": [*resources.samples, *([resources.settled()] if settle else [])],
    }


def fit_with(options: dict[str, Any]) -> dict[str, Any]:
    """:func:`fit` with its options in one dictionary."""
    return fit(**options)

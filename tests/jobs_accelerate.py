"""What the ranks of Accelerate's tests do: plain loops, with faults, whose end state is digested."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from jobs import Samples
from jobs_fabric import Net
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from accelerate_plugin import AccelPactPlugin
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan


class Prepared:
    """An accelerator with model, optimizer, loader and schedule."""

    def __init__(
        self,
        faults: list[Fault] | None = None,
        *,
        accumulate: int = 2,
        dataset: Dataset | None = None,
        accelerator: dict[str, Any] | None = None,
        loader: dict[str, Any] | None = None,
        **plugin: Any,
    ) -> None:
        options = {"faults": FaultPlan(faults or ()), "goodput": False, "collective_timeout": 30.0,
                   "repair_budget": 60.0, **plugin}  # fmt: skip
        self.accelerator = Accelerator(
            gradient_accumulation_steps=accumulate,
            fsdp_plugin=FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["Block"],
                cpu_ram_efficient_loading=False,
            ),
            kwargs_handlers=[AccelPactPlugin(**options)],
            dataloader_config=DataLoaderConfiguration(**(loader or {})),
            **(accelerator or {}),
        )
        set_seed(11)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 8, 0.9)
        batches = DataLoader(dataset or Samples(), batch_size=4, shuffle=not isinstance(dataset, IterableDataset))
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            model, optimizer, batches, schedule
        )

    @property
    def run(self) -> Any:
        return self.accelerator.accelpact

    def result(self, **more: Any) -> dict[str, Any]:
        """Where this rank ended."""
        self.accelerator.end_training()
        return {
            "digest": state_digest(self.model, [self.optimizer.optimizer]),
            "updates": self.run.committed_updates,
            "rate": self.optimizer.param_groups[0]["lr"],
            "step_count": self.schedule.scheduler._step_count,
            "mean": self.model.mean.compute().item(),
            "calls": self.model.calls,
            "outputs": self.model.outputs,
            "pending": [str(fault) for fault in self.run.pending_faults],
            "incidents": [incident.to_dict() for incident in self.run.incidents],
            **more,
        }


def call(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """One of the jobs below, by its name."""
    return globals()[name](*args, **options)


def drop_in(run: Any, fault: Fault | None) -> None:
    """Let a fault strike here, on its rank; for places that have no fault point."""
    if fault is not None and fault.rank == torch.distributed.get_rank():
        run.runtime.machine.faults.strike(fault)


def train(
    faults: list[Fault] | None = None, *, updates: int = 5, log: Callable[..., None] | None = None, **options: Any
) -> dict[str, Any]:
    """The standard idiom."""
    prepared = Prepared(faults, **options)
    accelerator, model, optimizer = prepared.accelerator, prepared.model, prepared.optimizer
    done, epochs = 0, 0
    losses: list[float] = []
    while done < updates:
        epochs += 1
        model.train()
        for inputs, targets in prepared.loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                model.mean.update(loss.detach())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                prepared.schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                done += 1
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if done == updates:
                break
    return prepared.result(losses=losses, epochs=epochs)

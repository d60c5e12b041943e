"""The probes' training under Fabric."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from lightning_accelpact.fabric import FabricHSDPStrategy
from lightning_accelpact.qualification.model import MICRO_BATCHES, UPDATES, batches, blocks
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan


def train(
    faults: list[Fault], options: dict[str, Any], accelerator: str, backend: str
) -> tuple[str, list[dict[str, Any]]]:
    """Train, and say where this rank has ended and what happened on the way."""
    strategy = FabricHSDPStrategy(
        faults=FaultPlan(faults), goodput=False, envelope="off", process_group_backend=backend, **options
    )
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = int(os.environ["WORLD_SIZE"]) // local
    fabric = Fabric(accelerator=accelerator, devices=local, num_nodes=nodes, strategy=strategy)
    fabric.launch()
    model = fabric.setup(blocks())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))

    def update(window: list[Tensor]) -> None:
        optimizer.zero_grad()
        for index, batch in enumerate(window):
            with fabric.no_backward_sync(model, enabled=index < len(window) - 1):
                fabric.backward(model(batch).square().mean())
        optimizer.step()

    data = [batch.to(fabric.device) for batch in batches(fabric.global_rank)]
    for number in range(UPDATES):
        strategy.run_update(update, data[number * MICRO_BATCHES : (number + 1) * MICRO_BATCHES])
        fabric.barrier()  # so that nobody has begun the next update when a fault strikes before it
    strategy.finish()
    digest = state_digest(model.module, [optimizer.optimizer])
    return digest, [incident.to_dict() for incident in strategy.incidents]

"""The training under Accelerate of the probes that qualify a stack."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader

from accelerate_plugin import AccelPactPlugin
from lightning_accelpact.qualification.model import BATCH, MICRO_BATCHES, UPDATES, batches, blocks
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import Fault, FaultPlan


def train(
    faults: list[Fault], options: dict[str, Any], accelerator: str, backend: str
) -> tuple[str, list[dict[str, Any]]]:
    """Train, and say where this rank has ended and what happened on the way.

    Raises:
        ValueError: if the backend is not the device's own, which Accelerate takes.
    """
    if backend != ("gloo" if accelerator == "cpu" else "nccl"):
        raise ValueError(f"Accelerate cannot be made to use {backend} on {accelerator}")
    plugin = AccelPactPlugin(faults=FaultPlan(faults), goodput=False, envelope="off", **options)
    prepared = Accelerator(
        cpu=accelerator == "cpu",
        gradient_accumulation_steps=MICRO_BATCHES,
        fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
        ),
        kwargs_handlers=[plugin],
    )
    module = blocks()
    data = torch.cat([torch.cat(batches(rank, 2 * UPDATES * MICRO_BATCHES)) for rank in range(prepared.num_processes)])
    model, optimizer, loader = prepared.prepare(
        module, torch.optim.AdamW(module.parameters(), lr=0.01), DataLoader(data, batch_size=BATCH)
    )
    torch.manual_seed(2 + prepared.process_index)
    model.train()
    done = 0
    for batch in loader:  # longer than needed, since an update that runs again costs further iterations
        with prepared.accumulate(model):
            prepared.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if prepared.sync_gradients:
            done += 1
            prepared.wait_for_everyone()  # so that nobody has begun the next update when a fault strikes before it
        if done == UPDATES:
            break
    run = prepared.accelpact
    prepared.end_training()
    return state_digest(model, [optimizer.optimizer]), [incident.to_dict() for incident in run.incidents]

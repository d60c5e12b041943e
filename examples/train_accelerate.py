"""Train a small language model on 4 local processes (2 replicas x 2 shards) in a plain Accelerate loop, with faults.

The same model and text as in ``train_lightning.py``. Nothing in the loop knows about recovery: the configuration file
turns it on. To see links fail in the middle of a backward pass and between two updates, and that the weights come out
the same:

    accelerate launch --config_file examples/accelerate_hsdp.yaml examples/train_accelerate.py \
        --fault backward@3:3 --fault boundary@5 --verify

``ACCELERATE_USE_ACCELPACT=false`` in front of it turns recovery off, and the same fault ends the training.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass

import drill
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from decoder import Decoder, StandardLibrary, warm_up_then_cosine
from torch.utils.data import DataLoader

from accelerate_plugin import allow_fsdp_on_cpu
from lightning_accelpact import FaultPlan
from lightning_accelpact.recovery.digest import state_digest


@dataclass
class Outcome:
    """What every rank holds at the end of training, and whether one of its faults has never struck."""

    digests: tuple[str, ...]
    faults_left: tuple[bool, ...]
    speaks: bool


def fit(args: argparse.Namespace, faults: FaultPlan | None) -> Outcome:
    """Train, from the same start every time."""
    os.environ["ACCELPACT_FAULTS"] = ",".join(map(str, faults.faults if faults else ()))
    allow_fsdp_on_cpu()  # Accelerate itself wants GPUs for FSDP
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate)
    set_seed(args.seed)
    model = Decoder(layers=args.layers, width=args.width, context=args.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    processes = accelerator.num_processes  # Accelerate steps a schedule so many times in each update
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warm_up_then_cosine(step // processes, args.updates)
    )
    size = args.updates * args.accumulate * args.batch_size * processes
    loader = DataLoader(StandardLibrary(size=size, context=args.context), args.batch_size, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    left = drill.faults_left(accelerator, model, optimizer, faults)

    update = 0
    for text in loader:
        with accelerator.accumulate(model):
            loss = model(text)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:  # an update has been applied
            accelerator.print(f"update {update}: loss {accelerator.reduce(loss.detach(), 'mean').item():.3f}")
            update += 1

    digests, faults_left = zip(*gather_object([(state_digest(model, [optimizer.optimizer]), left())]), strict=True)
    accelerator.end_training()
    accelerator.free_memory()
    return Outcome(digests, faults_left, speaks=accelerator.is_main_process)


if __name__ == "__main__":
    drill.main(fit, __doc__)

"""Train a small language model on 4 local processes (2 replicas x 2 shards) in a loop of one's own, with faults.

The same model and text as in ``train_lightning.py``, under Lightning Fabric. To see a link fail in the middle of a
backward pass, and that the weights come out the same as without it:

    python examples/train_fabric.py --fault backward@3:3 --verify

``torchrun --nproc-per-node 4 examples/train_fabric.py`` works as well.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import islice

import drill
import torch
from decoder import Decoder, StandardLibrary, warm_up_then_cosine
from lightning.fabric import Fabric
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accelpact import FabricHSDPStrategy, FaultPlan
from lightning_accelpact.recovery.digest import state_digest


@dataclass
class Outcome:
    """What every rank holds at the end of training, and whether one of its faults has never struck."""

    digests: tuple[str, ...]
    faults_left: tuple[bool, ...]
    speaks: bool


def fit(args: argparse.Namespace, faults: FaultPlan | None) -> Outcome:
    """Train, from the same start every time."""
    # Without options: strategy="accelpact_hsdp"
    strategy = FabricHSDPStrategy(replicate=2, shard=2, faults=faults)
    fabric = Fabric(accelerator="cpu", devices=drill.PROCESSES, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(args.seed)
    model = fabric.setup(Decoder(layers=args.layers, width=args.width, context=args.context))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, args.updates))
    size = args.updates * args.accumulate * args.batch_size * drill.PROCESSES
    corpus = StandardLibrary(size=size, context=args.context)
    loader = fabric.setup_dataloaders(DataLoader(corpus, args.batch_size, shuffle=True))

    def update(micro_batches: list[Tensor]) -> float:
        """One update, which may have to run again: its batches come from outside, and it steps at its end."""
        total = 0.0
        for index, text in enumerate(micro_batches, start=1):
            with fabric.no_backward_sync(model, enabled=index < len(micro_batches)):
                loss = model(text) / len(micro_batches)
                fabric.backward(loss)
            total += loss.item()
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        return total

    texts = iter(loader)
    for number in range(args.updates):
        micro_batches = list(islice(texts, args.accumulate))
        loss = strategy.run_update(update, micro_batches)
        schedule.step()
        fabric.print(f"update {number}: loss {loss:.3f}")

    mine = [state_digest(model.module, [optimizer.optimizer]), bool(strategy.pending_faults)]
    digests, faults_left = zip(*strategy.gather_json(mine), strict=True)
    strategy.finish()
    return Outcome(digests, faults_left, speaks=fabric.is_global_zero)


if __name__ == "__main__":
    drill.main(fit, __doc__)

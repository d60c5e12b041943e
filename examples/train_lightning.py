"""Train a small language model on 4 local processes (2 replicas x 2 shards) under Lightning's Trainer, with faults.

The text is the Python standard library's own source, so nothing is downloaded. To see a link fail in the middle of a
backward pass, and that the weights come out the same as without it:

    python examples/train_lightning.py --fault backward@3:3 --verify

``torchrun --nproc-per-node 4 examples/train_lightning.py`` works as well.
"""

from __future__ import annotations

import argparse
from typing import Any

import drill
import lightning as L
import torch
from decoder import Decoder, StandardLibrary, warm_up_then_cosine
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accelpact import FaultPlan, ResilientHSDPStrategy
from lightning_accelpact.recovery.digest import state_digest


class LanguageModel(L.LightningModule):
    """What Lightning trains. Nothing in it knows about sharding or recovery."""

    def __init__(self, decoder: Decoder, updates: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.updates = updates

    def training_step(self, text: Tensor, _: int) -> Tensor:
        loss = self.decoder(text)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_cosine(step, self.updates))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Outcome(L.Callback):
    """What every rank holds at the end of training, and whether one of its faults has never struck."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy = trainer.strategy
        mine = [state_digest(module, trainer.optimizers), bool(strategy.pending_faults)]
        self.digests, self.faults_left = zip(*strategy.gather_json(mine), strict=True)
        self.speaks = trainer.is_global_zero


def fit(args: argparse.Namespace, faults: FaultPlan | None) -> Outcome:
    """Train, from the same start every time."""
    L.seed_everything(args.seed, workers=True)
    decoder = Decoder(layers=args.layers, width=args.width, context=args.context)
    size = args.updates * args.accumulate * args.batch_size * drill.PROCESSES
    loader = DataLoader(StandardLibrary(size=size, context=args.context), args.batch_size, shuffle=True)
    outcome = Outcome()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=drill.PROCESSES,
        # The only line that makes the run resilient. Without options: strategy="accelpact_hsdp"
        strategy=ResilientHSDPStrategy(replicate=2, shard=2, faults=faults),
        max_epochs=1,
        max_steps=args.updates,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=1.0,
        callbacks=[outcome],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(decoder, args.updates), loader)
    return outcome


if __name__ == "__main__":
    drill.main(fit, __doc__)

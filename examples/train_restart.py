"""Stop a training in the middle, let torchrun start it again, and see it go on from its newest complete checkpoint.

    torchrun --nproc-per-node 4 --max-restarts 1 examples/train_restart.py --root runs/stopped --stop-at 7
    torchrun --nproc-per-node 4 examples/train_restart.py --root runs/whole

The first command writes a checkpoint after every 4th update, fail-stops after the 7th, is relaunched, and replays 3
updates; its summary covers both attempts. Both commands end with the same line of digests.
"""

from __future__ import annotations

import argparse
import os

import drill
import lightning as L
from decoder import Decoder, StandardLibrary
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from train_lightning import LanguageModel, Outcome

from lightning_accelpact import FaultPlan, ResilientHSDPStrategy


def fit(args: argparse.Namespace) -> Outcome:
    """Nothing here looks for a checkpoint, or knows which attempt it is but for the fault."""
    L.seed_everything(0, workers=True)
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    fault = FaultPlan.parse([f"backward@{args.stop_at}:3"]) if args.stop_at and first else None
    size = args.updates * 2 * 8 * drill.PROCESSES
    outcome = Outcome()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=drill.PROCESSES,
        # With uncommitted="restart" a fault inside an update is not repaired in memory
        strategy=ResilientHSDPStrategy(replicate=2, shard=2, faults=fault, uncommitted="restart"),
        max_epochs=1,
        max_steps=args.updates,
        accumulate_grad_batches=2,
        callbacks=[ModelCheckpoint(every_n_train_steps=args.checkpoint_every), outcome],
        default_root_dir=args.root,
        logger=False,
        enable_model_summary=False,
    )
    model = LanguageModel(Decoder(layers=4, width=64, context=64), args.updates)
    trainer.fit(model, DataLoader(StandardLibrary(size=size, context=64), 8, shuffle=True))
    return outcome


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--root", default="runs/restart", help="folder of the run (default: %(default)s)")
    parser.add_argument("--updates", type=drill.positive, metavar="N", default=12, help="(default: %(default)s)")
    parser.add_argument("--checkpoint-every", type=drill.positive, metavar="N", default=4, help="(default: %(default)s)")
    parser.add_argument("--stop-at", type=int, metavar="N", default=0, help="fail-stop in the update after this one")
    outcome = fit(parser.parse_args())
    if outcome.speaks:
        print("digests:", *(digest[:12] for digest in outcome.digests))

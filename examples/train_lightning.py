"""Train a small character-level language model on 4 local processes (2 replicas x 2 shards) and survive faults.

The text is the Python standard library's own source, so nothing is downloaded. To see a link fail in the middle of a
backward pass, and that the weights come out the same as without it:

    python examples/train_lightning.py --fault backward@3:3 --verify

``torchrun --nproc-per-node 4 examples/train_lightning.py`` works as well.
"""

from __future__ import annotations

import argparse
import math
import sys
import sysconfig
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_accelpact import FaultPlan, ResilientHSDPStrategy
from lightning_accelpact.recovery.digest import state_digest
from lightning_accelpact.recovery.fault import FaultPoint

PROCESSES = 4
HEAD_WIDTH = 16
CHARACTERS = 128  # ASCII
CORPUS_SIZE = 1_000_000


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each around a residual connection."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, -1, HEAD_WIDTH))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each: batch, head, position, HEAD_WIDTH
        dropout = self.dropout if self.training else 0.0
        attended = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """A GPT-like causal language model over ASCII characters."""

    def __init__(self, *, layers: int, width: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, dropout) for _ in range(layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CHARACTERS))

    def forward(self, text: Tensor) -> Tensor:
        x = self.characters(text) + self.positions.weight[: text.shape[1]]
        return self.head(self.blocks(x))


class LanguageModel(L.LightningModule):
    """What Lightning trains. Nothing in it knows about sharding or recovery."""

    def __init__(self, decoder: Decoder, updates: int) -> None:
        super().__init__()
        self.decoder = decoder
        self.updates = updates

    def training_step(self, text: Tensor, _: int) -> Tensor:
        logits = self.decoder(text[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.warm_up_then_cosine)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def warm_up_then_cosine(self, step: int) -> float:
        return min((step + 1) / 5, (1 + math.cos(math.pi * step / self.updates)) / 2)


class StandardLibrary(Dataset[Tensor]):
    """``size`` pieces of ``context + 1`` characters from the source of Python's standard library."""

    def __init__(self, *, size: int, context: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(file.read_text("ascii", errors="ignore").encode() for file in files)[:CORPUS_SIZE]
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = context + 1
        generator = torch.Generator().manual_seed(0)
        self.starts = torch.randint(len(self.text) - self.length, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> Tensor:
        return self.text[self.starts[index] :][: self.length].long()


class Outcome(L.Callback):
    """What every rank holds at the end of training, and whether one of its faults has never struck."""

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        strategy = trainer.strategy
        mine = [state_digest(module, trainer.optimizers), bool(strategy.machine.faults)]
        self.digests, self.faults_left = zip(*strategy.gather_json(mine), strict=True)
        self.speaks = trainer.is_global_zero


def fit(args: argparse.Namespace, faults: FaultPlan | None) -> Outcome:
    """Train, from the same start every time."""
    L.seed_everything(args.seed, workers=True)
    decoder = Decoder(layers=args.layers, width=args.width, context=args.context)
    size = args.updates * args.accumulate * args.batch_size * PROCESSES
    loader = DataLoader(StandardLibrary(size=size, context=args.context), args.batch_size, shuffle=True)
    outcome = Outcome()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=PROCESSES,
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


def faults_of(args: argparse.Namespace) -> FaultPlan:
    """The faults that were asked for, each of which must be able to strike."""
    plan = FaultPlan.parse(args.fault)
    for text, fault in zip(args.fault, plan.faults, strict=True):
        if fault.update >= args.updates or (fault.micro_batch or 0) >= args.accumulate or fault.rank >= PROCESSES:
            raise ValueError(
                f"{text} never strikes: there are updates 0 to {args.updates - 1} with micro-batches 0 to"
                f" {args.accumulate - 1} on ranks 0 to {PROCESSES - 1}"
            )
    return plan


def parse_arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        if not text.isdigit() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
        return int(text)

    parser = argparse.ArgumentParser(
        description="Train a small character-level language model on 4 local processes (2 replicas x 2 shards)."
    )
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="PHASE@UPDATE[:RANK]",
        help="cut this rank's connections there; may be given more than once. PHASE is one of "
        + ", ".join(point.value for point in FaultPoint),
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="train again without the faults and compare every bit of weights and optimizer state on every rank",
    )
    for option, default, meaning in (
        ("--updates", 10, "optimizer steps"),
        ("--accumulate", 2, "micro-batches per update"),
        ("--layers", 4, "blocks of the decoder"),
        ("--width", 64, f"features per character, a multiple of {HEAD_WIDTH}"),
        ("--context", 64, "characters per piece of text"),
        ("--batch-size", 8, "pieces of text per process and micro-batch"),
    ):
        meaning += f" (default: {default})"
        parser.add_argument(option, type=positive, metavar="N", default=default, help=meaning)
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of weights and dropout (default: 0)")
    args = parser.parse_args()
    if args.width % HEAD_WIDTH:
        parser.error(f"--width must be a multiple of {HEAD_WIDTH}, got {args.width}")
    try:
        args.faults = faults_of(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def main() -> None:
    args = parse_arguments()
    outcome = fit(args, args.faults)
    if any(outcome.faults_left):
        sys.exit("a fault has never struck, so nothing was shown" if outcome.speaks else 0)
    if args.verify:
        exact = fit(args, None).digests == outcome.digests
        if outcome.speaks:
            print(f"bit-exact: {'yes' if exact else 'no'}")
            sys.exit(not exact)


if __name__ == "__main__":
    main()

"""A script that a launcher starts: the regressor under the strategy's name, with one rank's links cut on the way.

Usage: python launched.py FOLDER UPDATE RANK [kill]: in that update, inside a forward pass, that rank's connections are
shut down, or its process is killed. Each rank writes what it ends with to a file in the folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jobs
import lightning.pytorch as pl

from lightning_accelpact.recovery.digest import state_digest

_OBSERVED_S = 6.0  # within which Lightning's own launcher looks after the ranks that it has started


class Strike(pl.Callback):
    """Shuts this rank's links down, once, or kills it."""

    def __init__(self, update: int, rank: int, *, kill: bool) -> None:
        self.update = update
        self.rank = rank
        self.kill = kill

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if (trainer.global_step, trainer.global_rank) == (self.update, self.rank):
            self.rank = -1
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            assert trainer.strategy.runtime.session.communicators.links.cut() > 0

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.kill and trainer.global_rank == 0:
            time.sleep(_OBSERVED_S)


def main(folder: Path, update: int, rank: int, *, kill: bool) -> None:
    pl.seed_everything(11, workers=True, verbose=False)
    module = jobs.Regressor()
    trainer = pl.Trainer(
        strategy="accelpact_hsdp",
        accelerator="cpu",
        devices=4,
        max_steps=3,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[Strike(update, rank, kill=kill)],
    )
    trainer.fit(module)
    result = {
        "strategy": type(trainer.strategy).__name__,
        "launcher": type(trainer.strategy.launcher).__name__,
        "digest": state_digest(module, trainer.optimizers),
        "incidents": [incident.to_dict() for incident in trainer.strategy.incidents],
    }
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), kill=sys.argv[4:] == ["kill"])

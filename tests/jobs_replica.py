"""A fit in which a bit flips in the memory of one rank."""

from __future__ import annotations

import os
from typing import Any

import jobs
import lightning.pytorch as pl
import torch


class BitFlip(pl.Callback):
    """Flips the last bit of the first number of a shard, after an update.

    Args:
        victim: On which rank.
        update: After which update.
        name: In which parameter.
        key: In which value of its optimizer state; empty for the parameter itself.
    """

    def __init__(self, victim: int, update: int, name: str, key: str) -> None:
        self._strikes = int(os.environ["RANK"]) == victim
        self._update, self._name, self._key = update, name, key

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if self._strikes and trainer.global_step == self._update:
            self._strikes = False
            parameter = dict(module.named_parameters())[self._name]
            tensor = trainer.optimizers[0].state[parameter][self._key] if self._key else parameter
            tensor.detach().to_local().view(torch.uint8).view(-1)[0] ^= 1


def fit(victim: int, update: int, name: str, key: str, options: dict[str, Any]) -> dict[str, Any]:
    """:func:`jobs.fit` with a bit that flips; says what the replicas have found."""
    seen: list[Any] = []

    class Found(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
            seen.extend((one.update, one.name, list(one.ranks), one.certain) for one in trainer.strategy.divergences)

    callbacks = [BitFlip(victim, update, name, key), Found()]
    result = jobs.fit(**options, trainer_options={"callbacks": callbacks})
    return {**result, "divergences": seen}

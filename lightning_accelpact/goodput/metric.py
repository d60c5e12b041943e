"""Goodput over all ranks, as a torchmetrics metric. Needs torch, as the rest of the package does not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torchmetrics import Metric

from lightning_accelpact.goodput.ledger import TimeClass
from lightning_accelpact.goodput.tracking import named_values

_CLASSES = tuple(TimeClass)
_PRODUCTIVE = _CLASSES.index(TimeClass.PRODUCTIVE)


class GoodputMetric(Metric):
    """What the time of all ranks went to, and how many incidents there were.

    Its value is the same on every rank, and comes from two gathers:

    * ``goodput``: productive share of the rank-seconds, 0 to 1; 0 before any time has passed.
    * ``elapsed_s``: rank-seconds, that is, seconds summed over the ranks.
    * ``<class>_s``: those of each :class:`TimeClass`; together they are ``elapsed_s``.
    * ``incidents``: the highest count of any rank, since a repair is an incident of every rank.

    Args:
        kwargs: As for any torchmetrics metric, such as ``dist_sync_fn``.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False

    # Of torch.float64, which torchmetrics keeps whatever the model is cast to: days, to the microsecond
    seconds: torch.Tensor
    incidents: torch.Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_state("seconds", torch.zeros(len(_CLASSES), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("incidents", torch.zeros((), dtype=torch.int64), dist_reduce_fx="max")

    def update(self, seconds: Mapping[TimeClass, float], incidents: int = 0) -> None:
        """Add what has been spent.

        Args:
            seconds: Seconds of this rank by class; absent classes are 0.
            incidents: Incidents of this rank in that time.

        Raises:
            ValueError: if an amount is negative or not finite.
        """
        amounts = [float(seconds.get(cls, 0.0)) for cls in _CLASSES]
        if incidents < 0 or not all(math.isfinite(amount) and amount >= 0 for amount in amounts):
            raise ValueError(
                f"update() needs finite seconds and a number of incidents of at least 0, got {dict(seconds)!r} and"
                f" {incidents!r}; to replace what was added before, call reset() first"
            )
        self.seconds += torch.tensor(amounts, dtype=torch.float64, device=self.seconds.device)
        self.incidents += incidents

    def compute(self) -> dict[str, torch.Tensor]:
        """The values by name; scalars."""
        elapsed = self.seconds.sum()
        goodput = self.seconds[_PRODUCTIVE] / elapsed if elapsed > 0 else torch.zeros_like(elapsed)
        of_classes = {f"{cls.value}_s": amount for cls, amount in zip(_CLASSES, self.seconds, strict=True)}
        return {"goodput": goodput, "elapsed_s": elapsed, **of_classes, "incidents": self.incidents.clone()}

    def measure(self, seconds: Mapping[TimeClass, float], incidents: int) -> dict[str, float]:
        """Replace what was added before, and give the values over all ranks as they are logged; a collective call.

        Args:
            seconds: As for :meth:`update`, since the start of the program.
            incidents: Likewise.

        Returns:
            As of :func:`~.tracking.named_values`.
        """
        self.reset()
        self.update(seconds, incidents)
        values = {name: value.item() for name, value in self.compute().items()}
        return named_values({cls: values[f"{cls.value}_s"] for cls in _CLASSES}, values["incidents"])

"""How often training is interrupted, and by what: a rate that grows with the cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from lightning_accelpact.goodput.ranges import Range, bounds, over

DAY_S = 86_400.0


class FailureClass(str, Enum):
    """What is lost with a failure, which is what decides about its repair."""

    # A link or a collective: every process lives
    NETWORK = "network"
    # A process, a device or a node, while a replica of its state lives elsewhere
    NODE = "node"
    # The state itself, or something that strikes all ranks: a bug, silently wrong data, a site
    JOB = "job"


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Interruptions of a job that runs on the whole of a cluster.

    Args:
        name: What it is called.
        source: Where the figures are from.
        per_gpu_day: Interruptions per GPU and day.
        shares: Share of each class, together 1.
        variation: Coefficient of variation of the times between them: 1 if they come independently (Poisson), more in
            bursts. Only the simulation heeds it.

    Raises:
        ValueError: if a rate or share is negative or not finite, the shares do not add up to 1, or ``variation`` is not
            more than 0.
    """

    name: str
    source: str
    per_gpu_day: float | Range
    shares: Mapping[FailureClass, float]
    variation: float = 1.0

    def __post_init__(self) -> None:
        if not all(math.isfinite(rate) and rate >= 0 for rate in bounds(self.per_gpu_day)):
            raise ValueError(f"per_gpu_day must be finite and at least 0, got {self.per_gpu_day!r}")
        if min(self.shares.values()) < 0 or not math.isclose(sum(self.shares.values()), 1, abs_tol=1e-6):
            raise ValueError(f"the shares of the failure classes must be at least 0 and add up to 1, got {self.shares}")
        if not (math.isfinite(self.variation) and self.variation > 0):
            raise ValueError(f"variation must be finite and more than 0, got {self.variation!r}; 1 is Poisson")

    def per_day(self, gpus: int) -> float | Range:
        """Interruptions a day of a job on so many GPUs: proportional, as any part that fails interrupts all.

        The proportion is what RSC's failure model assumes and finds up to some thousand GPUs.
        """
        return over(lambda per_gpu_day: per_gpu_day * gpus, per_gpu_day=self.per_gpu_day)

    def between_s(self, gpus: int) -> float | Range:
        """Mean seconds between two interruptions on so many GPUs; infinite without any."""
        return over(lambda per_gpu_day: DAY_S / (per_gpu_day * gpus) if per_gpu_day else math.inf,
                    per_gpu_day=self.per_gpu_day)  # fmt: skip

    def with_rate(self, per_gpu_day: float | Range) -> Failures:
        """The same classes at another rate."""
        return replace(self, per_gpu_day=per_gpu_day)

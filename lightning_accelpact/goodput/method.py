"""A way to survive failures, and what training comes to with it in the long run: the closed form."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_accelpact.goodput.failures import DAY_S, FailureClass
from lightning_accelpact.goodput.intervals import best_interval

# Of e, in double precision, with room for a product
_LARGEST_EXPONENT = 300.0


@dataclass(frozen=True, kw_only=True)
class Handling:
    """What a method does about one class of failure.

    Args:
        in_memory: Share of these failures that it survives in memory, 0 to 1; after the others the job goes back to
            its last checkpoint.
        repair_s: Seconds that training stands still for one survived in memory.
        repeated_s: Seconds of work that one survived in memory repeats, on average.
        restart_s: Seconds from the failure until training goes on from a checkpoint, for the others.
    """

    in_memory: float = 0.0
    repair_s: float = 0.0
    repeated_s: float = 0.0
    restart_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to survive failures.

    Args:
        name: What it is called.
        note: What its figures rest on.
        overhead: What it costs while nothing fails, as a share of the training time; may be negative within noise.
        checkpoint_s: Seconds that training stands still for a checkpoint.
        lag_s: Seconds from there until the checkpoint can be used.
        shortest_interval_s: Seconds of training that must lie between two checkpoints.
        handling: What it does about each class of failure.
    """

    name: str
    note: str
    overhead: float = 0.0
    checkpoint_s: float
    lag_s: float = 0.0
    shortest_interval_s: float = 0.0
    handling: Mapping[FailureClass, Handling]

    def interval_s(self, failures_per_day: float, shares: Mapping[FailureClass, float]) -> float:
        """The best seconds of training between two checkpoints; infinite if no failure ever needs one."""
        restarts = failures_per_day * self.restart_share(shares)
        if not restarts:
            return math.inf
        best = best_interval(checkpoint_s=self.checkpoint_s, between_failures_s=DAY_S / restarts)
        return max(best, self.shortest_interval_s)

    def restart_share(self, shares: Mapping[FailureClass, float]) -> float:
        """Share of all failures after which the job goes back to a checkpoint."""
        return sum(share * (1 - self.handling[cls].in_memory) for cls, share in shares.items())


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What becomes of the time in the long run, as shares of all of it that add up to 1.

    Args:
        goodput: Work that is kept, at the speed of a run without any fault tolerance.
        overhead: What the method costs in steady state.
        checkpoints: Standing still for checkpoints.
        wasted: Work that is lost and done again, and the checkpoints in between.
        down: Standing still for repairs and restarts.
        interval_s: Seconds of training between two checkpoints; infinite without any.
    """

    goodput: float
    overhead: float
    checkpoints: float
    wasted: float
    down: float
    interval_s: float

    @property
    def lost_s_per_day(self) -> float:
        """Seconds a day that are not kept work."""
        return DAY_S * (1 - self.goodput)

    @classmethod
    def from_seconds(
        cls, *, overhead: float, kept: float, checkpoints: float, wasted: float, down: float, interval_s: float
    ) -> Outlook:
        """The outlook from the seconds spent on each.

        Args:
            overhead: Of the method, as a share of the training time; ``kept`` contains it.
            kept: Training whose work is kept.
            checkpoints: As the shares of this name.
            wasted: Likewise.
            down: Likewise.
            interval_s: Seconds of training between two checkpoints.
        """
        total = kept + checkpoints + wasted + down
        work = kept / (1 + overhead)
        return cls(
            goodput=work / total,
            overhead=(kept - work) / total,
            checkpoints=checkpoints / total,
            wasted=wasted / total,
            down=down / total,
            interval_s=interval_s,
        )


def outlook(
    method: Method,
    *,
    failures_per_day: float,
    shares: Mapping[FailureClass, float],
    interval_s: float | None = None,
) -> Outlook:
    """The closed form, for failures that come one by one at a constant rate (Poisson).

    Daly's complete model (see :func:`~.completion.daly_completion_time`), extended: failures survived in memory make
    the time between two restarts longer, classes have restarts of their own, and a checkpoint is usable only after a
    lag. A failure during a restart begins it again. First order where that hardly matters: the lag adds to each
    restart, and none strikes during a repair in memory.

    Args:
        method: What is done about failures.
        failures_per_day: Of all classes together.
        shares: Share of each class.
        interval_s: Seconds of training between two checkpoints; None for the best.
    """
    tau = method.interval_s(failures_per_day, shares) if interval_s is None else interval_s
    rate = failures_per_day / DAY_S
    restarts = rate * method.restart_share(shares)
    # Seconds of standing still and of repeated work, per second of training
    still = sum(rate * share * one.in_memory * one.repair_s for one, share in _handled(method, shares))
    repeated = sum(rate * share * one.in_memory * one.repeated_s for one, share in _handled(method, shares))
    if math.isinf(tau):
        return Outlook.from_seconds(
            overhead=method.overhead, kept=1.0, checkpoints=0.0, wasted=repeated, down=still, interval_s=tau
        )
    segment = tau + method.checkpoint_s
    # How often a segment is begun in vain; beyond the bound the goodput is 0 to any precision
    attempts = math.expm1(min(restarts * segment, _LARGEST_EXPONENT))
    running = attempts / restarts if restarts else segment  # seconds of training and checkpoints until one is kept
    lost = running - segment + attempts * min(method.lag_s, tau)
    down = attempts * _restart_s(method, rate, shares) + running * still
    return Outlook.from_seconds(
        overhead=method.overhead,
        kept=tau,
        checkpoints=method.checkpoint_s,
        wasted=lost + running * repeated,
        down=down,
        interval_s=tau,
    )


def _handled(method: Method, shares: Mapping[FailureClass, float]) -> list[tuple[Handling, float]]:
    return [(method.handling[cls], share) for cls, share in shares.items()]


def _restart_s(method: Method, rate: float, shares: Mapping[FailureClass, float]) -> float:
    """Mean seconds from a failure until training goes on, where further failures begin the restart again.

    A restart of ``R`` seconds is through with probability ``exp(-rate * R)``, and takes ``(1 - exp(-rate * R)) / rate``
    on average until then or until the next failure, whose class is drawn anew.
    """
    share = method.restart_share(shares)
    if not share:
        return 0.0
    first = [(one.restart_s, part * (1 - one.in_memory) / share) for one, part in _handled(method, shares)]
    again = [(one.restart_s, part) for one, part in _handled(method, shares)]
    through = sum(part * math.exp(-min(rate * seconds, _LARGEST_EXPONENT)) for seconds, part in again)
    spent_again = sum(part * _capped(seconds, rate) for seconds, part in again) / through
    return sum(part * (_capped(seconds, rate) - math.expm1(-rate * seconds) * spent_again) for seconds, part in first)


def _capped(seconds: float, rate: float) -> float:
    """Mean of ``min(seconds, time to the next failure)``."""
    return -math.expm1(-rate * seconds) / rate

"""A discrete-event simulation of a cluster: the closed form without its assumptions about when failures come."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_accelpact.goodput.failures import DAY_S, FailureClass
from lightning_accelpact.goodput.method import Method, Outlook

# Histories of the same cluster that are simulated side by side, at most
_HISTORIES = 1000
# How much each must hold at least, so that what is under way at its end hardly matters
_FEWEST_FAILURES = 50
_FEWEST_CHECKPOINTS = 100
_FEWEST_RESTARTS = 50  # as long as the longest
# What is enough to tell methods apart, and takes a fraction of a second
_ENOUGH_DAYS = 100_000.0
_ENOUGH_FAILURES = 1_000_000

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """How failures come, at a given rate.

    Args:
        variation: Coefficient of variation of the times between independent failures (gamma distributed): 1 is
            Poisson, more are bursts, less is more regular.
        cascade_share: Share of the failures that follow upon another, as a consequence of it: 0 up to below 1.
        cascade_s: Mean seconds after which they do.
        domain_share: Share of the node failures that take a whole failure domain (a rack, a power feed) with all
            replicas of some state: nothing in memory survives those.

    Raises:
        ValueError: if a value is outside of its range.
    """

    variation: float = 1.0
    cascade_share: float = 0.0
    cascade_s: float = 60.0
    domain_share: float = 0.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.variation) and self.variation > 0):
            raise ValueError(f"variation must be finite and more than 0, got {self.variation!r}; 1 is Poisson")
        if not 0 <= self.cascade_share < 1:
            raise ValueError(f"cascade_share must be from 0 to below 1, got {self.cascade_share!r}; 0 is independent")
        if not (math.isfinite(self.cascade_s) and self.cascade_s >= 0):
            raise ValueError(f"cascade_s must be finite seconds of at least 0, got {self.cascade_s!r}")
        if not 0 <= self.domain_share <= 1:
            raise ValueError(f"domain_share must be from 0 to 1, got {self.domain_share!r}; 0 is single nodes")

    def gaps(self, generator: np.random.Generator, size: int, between_s: float) -> Floats:
        """Seconds to the next failure, with a mean of ``between_s``.

        A mean that consequences alone fall short of is made up by the independent failures, never below 0.
        """
        share = self.cascade_share
        independent_s = max(0.0, between_s - share * self.cascade_s) / (1 - share)
        shape = self.variation**-2
        gaps = generator.gamma(shape, independent_s / shape, size)
        if not share:
            return gaps
        return np.where(generator.random(size) < share, generator.exponential(self.cascade_s, size), gaps)


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What has become of the simulated time.

    Args:
        outlook: The shares, as of the closed form.
        goodput_error: Standard error of its goodput; not a number if the time made one history only.
        days: Simulated days, all histories together.
        failures: Failures in them.
        restarts: How many of these ended in a restart from a checkpoint.
    """

    outlook: Outlook
    goodput_error: float
    days: float
    failures: int
    restarts: int


def enough_days(failures_per_day: float) -> float:
    """How many days to simulate: 100,000, or fewer with more than a million failures."""
    return min(_ENOUGH_DAYS, _ENOUGH_FAILURES / failures_per_day)


def simulate(
    method: Method,
    *,
    failures_per_day: float,
    shares: Mapping[FailureClass, float],
    days: float,
    seed: int,
    arrivals: Arrivals | None = None,
    interval_s: float | None = None,
) -> Simulation:
    """Simulate a job that trains on the whole of a cluster for ever.

    All ranks of a synchronous job stand still together, so an event is a failure of the cluster, not of each rank:
    16,384 ranks take as long as 16 at the same rate of failures.

    Args:
        method: What is done about failures.
        failures_per_day: Of the whole cluster, all classes together.
        shares: Share of each class.
        days: How long, together; split into up to 1,000 histories that begin at a checkpoint.
        seed: The same seed gives the same result.
        arrivals: How the failures come; None for Poisson.
        interval_s: Seconds of training between two checkpoints; None for the best of the closed form.

    Raises:
        ValueError: if ``days`` or ``failures_per_day`` is not finite and more than 0.
    """
    for name, value in {"days": days, "failures_per_day": failures_per_day}.items():
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and more than 0, got {value!r}")
    tau = method.interval_s(failures_per_day, shares) if interval_s is None else interval_s
    checkpoints_s = (tau + method.checkpoint_s) * _FEWEST_CHECKPOINTS if math.isfinite(tau) else 0.0
    restarts_s = max(handling.restart_s for handling in method.handling.values()) * _FEWEST_RESTARTS
    shortest_days = max(_FEWEST_FAILURES / failures_per_day, checkpoints_s / DAY_S, restarts_s / DAY_S)
    count = max(1, min(_HISTORIES, int(days / shortest_days)))
    histories = _Histories(method, shares, arrivals or Arrivals(), tau, days / count * DAY_S, count, seed)
    while histories.step(DAY_S / failures_per_day):
        pass
    return histories.result(days)


class _Histories:
    """Many histories of one cluster, one in each element of the arrays.

    At any time, ``progress`` is what training and checkpoints since the base (the checkpoint last gone back to) amount
    to: so many segments of an interval and a checkpoint, and a part of one.
    """

    def __init__(
        self,
        method: Method,
        shares: Mapping[FailureClass, float],
        arrivals: Arrivals,
        tau: float,
        horizon: float,
        count: int,
        seed: int,
    ) -> None:
        self._generator = np.random.default_rng(seed)
        self._method, self._arrivals, self._horizon = method, arrivals, horizon
        self._interval = tau
        self._tau = min(tau, 2 * horizon)  # without any checkpoint: one that never comes
        self._segment = self._tau + method.checkpoint_s
        self._classes = list(shares)
        self._limits = np.cumsum(list(shares.values()))[:-1]
        handling = [method.handling[cls] for cls in self._classes]
        self._in_memory = np.array([one.in_memory for one in handling])
        self._repair_s = np.array([one.repair_s for one in handling])
        self._repeated_s = np.array([one.repeated_s for one in handling])
        self._restart_s = np.array([one.restart_s for one in handling])
        self._now = np.zeros(count)  # up to where each history is known
        self._resume = np.zeros(count)  # when it trains again
        self._failure = np.zeros(count)  # its next failure
        self._restarting = np.zeros(count, dtype=bool)
        self._progress = np.zeros(count)
        self._segments = np.zeros(count)  # kept, up to the base
        self._wasted = np.zeros(count)
        self._down = np.zeros(count)
        self._failures = self._restarts = 0

    def step(self, between_s: float) -> bool:
        """Go on to the next failure of each history; False once all have come to their end."""
        self._failure += self._arrivals.gaps(self._generator, len(self._now), between_s)
        until = np.minimum(self._failure, self._horizon)
        still = np.maximum(np.minimum(self._resume, until) - self._now, 0.0)
        self._down += still
        trained = until - self._now - still
        self._progress += trained
        self._restarting &= trained <= 0
        self._now = until
        failed = self._failure < self._horizon
        self._strike(failed, trained)
        return bool(failed.any())

    def _strike(self, failed: Flags, trained: Floats) -> None:
        cls = np.searchsorted(self._limits, self._generator.random(len(failed)), side="right")
        survived = failed & self._survived(cls)
        lost = failed & ~survived
        repeated = np.where(survived, self._generator.uniform(0, 2, len(failed)) * self._repeated_s[cls], 0.0)
        repeated = np.minimum(repeated, trained)  # since the failure before: what that one cost is lost already
        self._progress -= repeated
        self._wasted += repeated
        usable = np.maximum(np.floor((self._progress - self._method.lag_s) / self._segment), 0.0)
        self._segments += np.where(lost, usable, 0.0)
        self._wasted += np.where(lost, self._progress - usable * self._segment, 0.0)
        self._progress[lost] = 0.0
        self._restarting |= lost
        still = np.where(survived, self._repair_s[cls], self._restart_s[cls])
        self._resume = np.where(failed, self._now + still, self._resume)
        self._failures += int(failed.sum())
        self._restarts += int(lost.sum())

    def _survived(self, cls: NDArray[np.int_]) -> Flags:
        """Which of these failures are survived in memory, where nothing is in memory during a restart."""
        draws = self._generator.random((2, len(cls)))
        survived = (draws[0] < self._in_memory[cls]) & ~self._restarting
        if self._arrivals.domain_share and FailureClass.NODE in self._classes:
            of_domain = (cls == self._classes.index(FailureClass.NODE)) & (draws[1] < self._arrivals.domain_share)
            survived &= ~of_domain
        return survived

    def result(self, days: float) -> Simulation:
        """The shares of all histories. What is under way at their end counts as kept."""
        complete = np.floor(self._progress / self._segment)
        rest = self._progress - complete * self._segment
        segments = self._segments + complete
        kept = segments * self._tau + np.minimum(rest, self._tau)
        checkpoints = segments * self._method.checkpoint_s + np.maximum(rest - self._tau, 0.0)
        outlook = Outlook.from_seconds(
            overhead=self._method.overhead,
            kept=float(kept.sum()),
            checkpoints=float(checkpoints.sum()),
            wasted=float(self._wasted.sum()),
            down=float(self._down.sum()),
            interval_s=self._interval,
        )
        goodputs = kept / (1 + self._method.overhead) / self._horizon
        return Simulation(
            outlook=outlook,
            goodput_error=float(goodputs.std(ddof=1) / math.sqrt(len(goodputs))) if len(goodputs) > 1 else math.nan,
            days=days,
            failures=self._failures,
            restarts=self._restarts,
        )

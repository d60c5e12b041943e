"""What each way to survive failures would come to on a given cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lightning_accelpact.goodput.failures import DAY_S, Failures
from lightning_accelpact.goodput.method import Method, Outlook, outlook
from lightning_accelpact.goodput.methods import methods
from lightning_accelpact.goodput.plan_inputs import PlanInputs
from lightning_accelpact.goodput.ranges import Range, bounds, likely, over
from lightning_accelpact.goodput.simulation import Arrivals, Simulation, enough_days, simulate


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One method.

    Args:
        method: At the likely values of the inputs.
        outlook: Likewise, by the closed form.
        goodput: With its range, if an input has one.
        break_even: Failures a day from which on it loses less than a cold restart: 0 if always, None if never. At the
            likely values of the other inputs.
        simulation: None if it was not asked for.
    """

    method: Method
    outlook: Outlook
    goodput: float | Range
    break_even: float | None
    simulation: Simulation | None

    @property
    def lost_s_per_day(self) -> float | Range:
        """Seconds a day that are not kept work, likewise."""
        low, high = (DAY_S * (1 - goodput) for goodput in reversed(bounds(self.goodput)))
        if isinstance(self.goodput, Range):
            return Range(low=low, likely=DAY_S * (1 - self.goodput.likely), high=high)
        return low

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON values; without any checkpoint, the interval is None."""
        interval = self.outlook.interval_s
        shares = {name: getattr(self.outlook, name) for name in ("overhead", "checkpoints", "wasted", "down")}
        simulated = self.simulation and {
            "goodput": self.simulation.outlook.goodput,
            "goodput_error": None if math.isnan(self.simulation.goodput_error) else self.simulation.goodput_error,
            "lost_s_per_day": self.simulation.outlook.lost_s_per_day,
            "days": self.simulation.days,
            "failures": self.simulation.failures,
            "restarts": self.simulation.restarts,
        }
        return {
            "method": self.method.name,
            "note": self.method.note,
            "goodput": _plain(self.goodput),
            "lost_s_per_day": _plain(self.lost_s_per_day),
            "checkpoint_interval_s": interval if math.isfinite(interval) else None,
            "checkpoint_s": self.method.checkpoint_s,
            "shares": shares,
            "break_even_failures_per_day": self.break_even,
            "simulation": simulated,
        }


def _plain(value: float | Range) -> float | dict[str, float]:
    return vars(value) if isinstance(value, Range) else value


def plan(
    inputs: PlanInputs, *, simulated_days: float | None = 0.0, seed: int = 0, arrivals: Arrivals | None = None
) -> list[PlanRow]:
    """Compare the methods, each at its own best checkpoint interval.

    Args:
        inputs: The cluster.
        simulated_days: How long to simulate each method; 0 for not at all, None for as long as it takes to tell them
            apart.
        seed: Of the simulation.
        arrivals: How failures come in the simulation; None as the failures' ``variation`` says.
    """
    one = inputs.at_likely()
    how = arrivals or Arrivals(variation=one.failures.variation)
    per_day = likely(one.failures.per_day(one.gpus))
    candidates = methods(inputs)
    days = enough_days(per_day) if simulated_days is None else simulated_days
    return [
        PlanRow(
            method=method,
            outlook=outlook(method, failures_per_day=per_day, shares=one.failures.shares),
            goodput=_goodput(inputs, index),
            break_even=break_even(method, candidates[0], one.failures) if index else None,
            simulation=simulate(
                method, failures_per_day=per_day, shares=one.failures.shares, days=days, seed=seed, arrivals=how,
            ) if days else None,
        )
        for index, method in enumerate(candidates)
    ]  # fmt: skip


def _goodput(inputs: PlanInputs, index: int) -> float | Range:
    """Of one method by the closed form, with its range: each combination of the inputs' ends is tried."""

    def at(**values: float) -> float:
        one = inputs.at(**values)
        per_day = likely(one.failures.per_day(one.gpus))
        return outlook(methods(one)[index], failures_per_day=per_day, shares=one.failures.shares).goodput

    return over(at, **inputs.ranges)


def break_even(method: Method, other: Method, failures: Failures) -> float | None:
    """Failures a day from which on ``method`` keeps more than ``other``; 0 if always, None if never.

    Between one failure in 3,000 years and a thousand a day, by halving on a logarithmic scale: the one with the lower
    overhead wins while nothing fails.
    """

    def better(log_rate: float) -> bool:
        goodputs = [
            outlook(one, failures_per_day=math.exp(log_rate), shares=failures.shares).goodput for one in (method, other)
        ]
        return goodputs[0] > goodputs[1]

    low, high = math.log(1e-6), math.log(1e3)
    if better(low):
        return 0.0
    if not better(high):
        return None
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if better(middle) else (middle, high)
    return math.exp(high)


def goodputs_by_size(inputs: PlanInputs, sizes: list[int]) -> dict[str, list[float]]:
    """Goodput of each method on clusters of other sizes, all else being equal: the job does not grow with it."""
    return _by_method(
        [
            [(method, outlook(method, failures_per_day=likely(one.failures.per_day(one.gpus)),
                              shares=one.failures.shares).goodput) for method in methods(one)]
            for one in (inputs.at_likely().at(gpus=size) for size in sizes)
        ]
    )  # fmt: skip


def goodputs_by_interval(inputs: PlanInputs, intervals_s: list[float]) -> dict[str, list[float]]:
    """Goodput of each method with other seconds of training between two checkpoints."""
    one = inputs.at_likely()
    per_day = likely(one.failures.per_day(one.gpus))
    return _by_method(
        [
            [(method, outlook(method, failures_per_day=per_day, shares=one.failures.shares, interval_s=interval,
                              ).goodput if interval >= method.shortest_interval_s else math.nan)
             for method in methods(one)]
            for interval in intervals_s
        ]
    )  # fmt: skip


def _by_method(columns: list[list[tuple[Method, float]]]) -> dict[str, list[float]]:
    return {rows[0][0].name: [goodput for _, goodput in rows] for rows in zip(*columns, strict=True)}

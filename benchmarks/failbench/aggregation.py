"""Records of many runs, brought together: each cell's outcomes, and for each figure n, mean and how sure it is."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from statistics import fmean, stdev

from benchmarks.failbench.cell import NO_FAULT, NO_MECHANISM, Cell
from benchmarks.failbench.record import Evidence, Outcome, Record

# Student's t, 97.5 %, for 1 to 30 degrees of freedom; beyond those the expansion of `_quantile` is good to 4 digits
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL = 1.959964
# The paper gives half-ranges for small samples, where normality cannot be relied upon (section V-E)
_FEW = 3


class Spread(StrEnum):
    """What the ``half`` of an estimate is."""

    T_INTERVAL = "95 % t"
    HALF_RANGE = "half-range"
    NONE = "none"


@dataclass(frozen=True)
class Estimate:
    """A figure from several samples.

    Args:
        n: Number of samples.
        mean: Their mean.
        half: Half the width of what ``spread`` names; 0 for one sample.
        spread: A 95 % interval of Student's t, for more than three samples half the range.
    """

    n: int
    mean: float
    half: float
    spread: Spread

    @property
    def low(self) -> float:
        """Lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """Upper end."""
        return self.mean + self.half


def t_quantile(degrees: int) -> float:
    """Student's t at 97.5 %.

    Raises:
        ValueError: for less than 1 degree of freedom.
    """
    if degrees < 1:
        raise ValueError(f"degrees={degrees} of freedom must be at least 1: give two samples or more")
    if degrees <= len(_T):
        return _T[degrees - 1]
    # Cornish-Fisher, the first two terms (Abramowitz and Stegun 26.7.5)
    z = _NORMAL
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def estimate(samples: Sequence[float]) -> Estimate | None:
    """n, mean and spread; None without samples."""
    if not samples:
        return None
    n, mean = len(samples), fmean(samples)
    if n == 1:
        return Estimate(n, mean, 0.0, Spread.NONE)
    if n <= _FEW:
        return Estimate(n, mean, (max(samples) - min(samples)) / 2, Spread.HALF_RANGE)
    return Estimate(n, mean, t_quantile(n - 1) * stdev(samples) / math.sqrt(n), Spread.T_INTERVAL)


# Figures of a record that are the samples of an estimate as they are
_LISTS = ("detect", "restore", "reform", "respawn", "recover", "save", "emergency")


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """All runs of a cell.

    Args:
        cell: Which.
        outcomes: How often each.
        evidence: What the figures rest on: the weakest of the runs.
        reasons: Of the runs that have one, each once.
        samples: Name of a figure -> all that is known of it: for the lists of a record one for each recovery or save,
            for all other figures one for each run.
    """

    cell: Cell
    outcomes: Mapping[Outcome, int]
    evidence: Evidence
    reasons: tuple[str, ...]
    samples: Mapping[str, Sequence[float]]

    @cached_property
    def estimates(self) -> Mapping[str, Estimate]:
        """Name of a figure -> its estimate; without those that nothing is known of."""
        return {name: found for name, values in self.samples.items() if (found := estimate(values))}

    @property
    def outcome(self) -> Outcome:
        """The most frequent one."""
        return max(self.outcomes, key=lambda outcome: self.outcomes[outcome])

    @property
    def runs(self) -> int:
        """Number of records."""
        return sum(self.outcomes.values())

    def mean(self, figure: str) -> float | None:
        """Mean of a figure; None if nothing is known of it."""
        found = self.estimates.get(figure)
        return found.mean if found else None


def pooled(summaries: Iterable[CellSummary], figure: str) -> Estimate | None:
    """A figure from the samples of several cells; None if there are none."""
    return estimate([value for one in summaries for value in one.samples.get(figure, ())])


def latest(records: Iterable[Record]) -> list[Record]:
    """Of the runs of the same cell, seed, preset and timeout the last one: a cell that was run again."""
    return list({run_key(record): record for record in records}.values())


RunKey = tuple[Cell, int, str, float | None]


def run_key(record: Record) -> RunKey:
    """What makes a run the same: its cell, seed and preset, and the timeout where that is what the trace is about."""
    timeout = record.detect_timeout_seconds if record.cell.trace == "hang" else None
    return record.cell, record.seed, record.preset, timeout


def summarize(records: Iterable[Record]) -> dict[Cell, CellSummary]:
    """Each cell's summary, in the order of their first records.

    Raises:
        ValueError: if the records are of several presets, whose figures cannot be brought together.
    """
    all_of_them = with_overhead(latest(records))
    presets = sorted({record.preset for record in all_of_them})
    if len(presets) > 1:
        raise ValueError(
            f"records of presets {', '.join(presets)} cannot be brought together: choose one with --preset"
        )
    grouped: dict[Cell, list[Record]] = defaultdict(list)
    for record in all_of_them:
        grouped[record.cell].append(record)
    matched = {(record.cell, record.seed): record for record in all_of_them if record.cell.trace == NO_FAULT}
    return {cell: _summary(cell, runs, matched) for cell, runs in grouped.items()}


def _summary(cell: Cell, runs: Sequence[Record], matched: Mapping[tuple[Cell, int], Record]) -> CellSummary:
    samples: dict[str, list[float]] = {
        name: [value for run in runs for value in getattr(run, f"{name}_seconds")] for name in _LISTS
    }
    for run in runs:
        twin = matched.get((cell.baseline, run.seed))
        for name, value in _figures(run, twin).items():
            samples.setdefault(name, []).append(value)
    order = list(Evidence)
    return CellSummary(
        cell=cell,
        outcomes=Counter(run.outcome for run in runs),
        evidence=max((run.evidence for run in runs), key=order.index),
        reasons=tuple(dict.fromkeys(run.reason for run in runs if run.reason)),
        samples=samples,
    )


def _figures(run: Record, twin: Record | None) -> dict[str, float]:
    """The figures of one run that are one number, by name."""
    skews = [abs(fault.skew_s) for fault in run.faults if fault.skew_s is not None]
    progress = loss_progress(run, twin) if twin else None
    found = {
        "overhead": run.steady_overhead,
        "lost_steps": run.lost_steps,
        "fresh_starts": run.fresh_starts,
        "lost": run.lost_seconds,
        "throughput_before": run.throughput_before,
        "throughput_after": run.throughput_after,
        "throughput_change": throughput_change(run),
        "skew": max(skews, default=None),
        "loss_reduction": progress[0] if progress else None,
        "matched_loss_reduction": progress[1] if progress else None,
        "stalled_share": stalled_share(run),
        "exact": same_weights(run, twin) if twin else None,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def throughput_change(run: Record) -> float | None:
    """Samples a second after the faults against before them: 0.179 is 17.9 % more."""
    if not run.throughput_before or run.throughput_after is None:
        return None
    return run.throughput_after / run.throughput_before - 1


def stalled_share(run: Record) -> float | None:
    """Seconds that saves made training stand still, for each second of training without them, before the first fault.

    Unlike the steady-state overhead it compares nothing with another run, so it does not drown in the noise between
    runs; but it misses what a mechanism does in the background or within its steps. 0 without saves in advance.
    """
    if not run.step_seconds_before:
        return None
    if not run.save_interval_steps:
        return 0.0
    if not run.save_seconds:
        return None
    stall = fmean(run.save_seconds) / run.save_interval_steps
    training = fmean(run.step_seconds_before) - stall
    return stall / training if training > 0 else None  # unless the saves after the fault took longer than those before


def same_weights(run: Record, twin: Record) -> bool | None:
    """Whether the run ended with the weights of the one without a fault; None if one of them did not end."""
    if run.cell.trace == NO_FAULT or run.weights_sha256 is None or twin.weights_sha256 is None:
        return None
    return run.weights_sha256 == twin.weights_sha256


def with_overhead(records: Sequence[Record]) -> list[Record]:
    """The records with their steady-state overhead: the mean step before a fault, against that without a mechanism.

    The paper's ``T_off / T_on - 1`` of throughputs, section V-F. Steps before a fault are as good as those of a run
    without one, so those of all traces are taken together.
    """
    plain: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        if record.cell.mechanism == NO_MECHANISM:
            plain[record.cell.architecture, record.preset] += record.step_seconds_before
    return [_with_overhead(record, plain[record.cell.architecture, record.preset]) for record in records]


def _with_overhead(record: Record, plain: Sequence[float]) -> Record:
    if not plain or not record.step_seconds_before:
        return record
    return replace(record, steady_overhead=fmean(record.step_seconds_before) / fmean(plain) - 1)


def loss_progress(run: Record, twin: Record) -> tuple[float, float] | None:
    """How far the loss fell in the same time from the first fault on: in this run, and in the one without a fault.

    As the paper does for A6 (section VI-C): both from the fault's step on, for as long as this run had steps left. How
    many the other one makes in that time follows from this run's pace before the fault, since the paces of two runs
    differ by more than what a lost rank may change. None if one did not end, or has too few steps.
    """
    struck = min((fault.step for fault in run.faults if fault.actual_s is not None), default=None)
    if struck is None or not (run.ended and twin.ended and run.step_seconds_after and run.step_seconds_before):
        return None
    slower = fmean(run.step_seconds_after) / fmean(run.step_seconds_before)
    left, left_without = len(run.losses) - struck, len(twin.losses) - struck
    ours = min(left, int(left_without / slower))
    theirs = min(left_without, round(ours * slower))
    falls = _fall(run.losses, struck, ours), _fall(twin.losses, struck, theirs)
    return None if falls[0] is None or falls[1] is None else (falls[0], falls[1])


# Losses of single batches jump; both ends of a fall are means over as many of them
_SMOOTHED = 3


def _fall(losses: Sequence[float], start: int, steps: int) -> float | None:
    first, last = losses[max(0, start - _SMOOTHED) : start], losses[start + steps - _SMOOTHED : start + steps]
    return fmean(first) - fmean(last) if first and last and steps >= _SMOOTHED else None

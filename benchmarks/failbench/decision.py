"""Which mechanism to take: expected completion times from the measured cells, under limits, with their evidence.

The model is the paper's (section IX): ``T0 * (1 + o) + (T0 / M) * (T_rec + W)``, minimized subject to caps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean
from typing import Any

from benchmarks.failbench.aggregation import latest, stalled_share, with_overhead
from benchmarks.failbench.cell import NO_MECHANISM
from benchmarks.failbench.record import Evidence, Outcome, Record
from lightning_accelpact.goodput.completion import completion_time, crossover

# Copies of a rank's state that a mechanism keeps: in the memory of hosts, and in storage (section II-B)
_IN_MEMORY = {"FT2": 1, "FT4": 1, "FT5": 1, "FT6": 2}
_IN_STORAGE = {"FT1": 1, "FT3": 1}
# Until a lost rank is made up for, if nothing is said about it: a node that is exchanged by hand
_REPLACE_S = 3600.0
# A state of another size than the measured one is an extrapolation
_SAME_SIZE = 0.1


class Tag(StrEnum):
    """What an input of the decision rests on, the best first."""

    GIVEN = "given"
    """By the user."""
    MEASURED = "measured"
    """In the records."""
    EXTRAPOLATED = "extrapolated"
    """From the records, in proportion to the state, the steps or the interval."""
    ANALYTIC = "analytic"
    """By a formula."""


@dataclass(frozen=True)
class Input:
    """A value and what it rests on.

    Args:
        value: A share, or seconds.
        tag: What it rests on.
    """

    value: float
    tag: Tag


@dataclass(frozen=True, kw_only=True)
class Question:
    """The job, the cluster and the limits.

    Args:
        architecture: Name, as in the records.
        between_failures_s: Mean seconds between failures of the job.
        state_bytes: Of a rank; None for what was measured.
        step_s: Seconds for a step without a mechanism; None for what was measured.
        interval_steps: Steps between two saves of periodic mechanisms; None for what was measured.
        detect_s: Seconds until a failure is noticed; None for what was measured.
        reform_s: Seconds for new process groups and processes; None for what was measured.
        warning_s: Seconds of warning before a failure; 0 if there is none.
        replace_s: Seconds until a lost rank is made up for, where a mechanism goes on without it; None for an hour.
        restore_cap_s: Longest effective restore.
        overhead_cap: Largest steady-state overhead, a share.
        host_memory_bytes: To spare for copies of states, on each rank's host.
        storage_bytes: To spare for one rank's checkpoints.
        work_s: Seconds that the job takes without failures and mechanism.
        by_steps: Take the overhead from the steps of different runs, as the paper does, and not from how long training
            stood still for saves in the runs themselves. That contains what a mechanism does in the background and
            within steps, but only on a machine that does nothing else is it more than noise.
    """

    architecture: str
    between_failures_s: float
    state_bytes: float | None = None
    step_s: float | None = None
    interval_steps: float | None = None
    detect_s: float | None = None
    reform_s: float | None = None
    warning_s: float = 0.0
    replace_s: float | None = None
    restore_cap_s: float = math.inf
    overhead_cap: float = math.inf
    host_memory_bytes: float = math.inf
    storage_bytes: float = math.inf
    work_s: float = 30 * 86_400.0
    by_steps: bool = False

    def __post_init__(self) -> None:
        for name in ("between_failures_s", "state_bytes", "step_s", "interval_steps", "work_s"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}={value!r} must be finite and more than 0")
        for name in (
            "detect_s",
            "reform_s",
            "warning_s",
            "replace_s",
            "restore_cap_s",
            "overhead_cap",
            "host_memory_bytes",
            "storage_bytes",
        ):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"{name}={value!r} must be at least 0")


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A mechanism, and what the job comes to with it.

    Args:
        mechanism: Name.
        inputs: ``overhead`` (a share), and seconds for each failure: ``detect``, ``restore``, ``reform``,
            ``lost_work`` and ``degraded`` (what is not trained while ranks are missing).
        completion_s: Expected completion time.
        obstacles: Why it is no choice; empty if it is one.
        growth: State in question by the measured one.
    """

    mechanism: str
    inputs: Mapping[str, Input]
    completion_s: float
    obstacles: tuple[str, ...] = ()
    growth: float = 1.0

    @property
    def overhead(self) -> float:
        """Steady-state overhead, a share."""
        return self.inputs["overhead"].value

    @property
    def failure_s(self) -> float:
        """Seconds that a failure costs, lost work included."""
        return sum(one.value for name, one in self.inputs.items() if name != "overhead")

    @property
    def tag(self) -> Tag:
        """The weakest of its inputs'."""
        order = list(Tag)
        return max((one.tag for one in self.inputs.values()), key=order.index)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The answer.

    Args:
        question: What was asked.
        candidates: All mechanisms with a record: first those that are a choice, the fastest first.
        break_evens: Mechanism -> the mean time between failures, in seconds, at which it takes as long as the best one;
            None if one of both is better at every rate.
    """

    question: Question
    candidates: Sequence[Candidate]
    break_evens: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def best(self) -> Candidate | None:
        """The mechanism to take; None if none is a choice."""
        return next((one for one in self.candidates if not one.obstacles), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "architecture": self.question.architecture,
            "best": self.best.mechanism if self.best else None,
            "candidates": [
                {
                    "mechanism": one.mechanism,
                    "completion_s": one.completion_s,
                    "evidence": one.tag.value,
                    "inputs": {
                        name: {"value": given.value, "evidence": given.tag.value} for name, given in one.inputs.items()
                    },
                    "obstacles": list(one.obstacles),
                    "break_even_s": self.break_evens.get(one.mechanism),
                }
                for one in self.candidates
            ],
        }


def decide(records: Sequence[Record], question: Question) -> Decision:
    """Compare the mechanisms that were measured on an architecture.

    Raises:
        ValueError: if there is no recovery on this architecture in the records.
    """
    runs = [one for one in with_overhead(latest(records)) if one.cell.architecture == question.architecture]
    measured: dict[str, list[Record]] = {}
    for run in runs:
        if run.outcome in (Outcome.RECOVERED, Outcome.CONTINUED) and run.evidence is Evidence.MEASURED:
            measured.setdefault(run.cell.mechanism, []).append(run)
    if not measured:
        known = sorted({one.cell.architecture for one in records if one.recovery_measured})
        raise ValueError(
            f"architecture={question.architecture!r} has no measured recovery in the records; those with one:"
            f" {', '.join(known) or 'none'}"
        )
    steps = [step for one in runs if one.cell.mechanism == NO_MECHANISM for step in one.step_seconds_before]
    candidates = [_candidate(name, found, question, steps) for name, found in measured.items()]
    candidates.sort(key=lambda one: (bool(one.obstacles), one.completion_s))
    return Decision(question=question, candidates=candidates, break_evens=_break_evens(candidates))


def _break_evens(candidates: Sequence[Candidate]) -> dict[str, float | None]:
    best, *others = candidates
    return {
        one.mechanism: crossover(
            overhead=best.overhead, failure_s=best.failure_s, other_overhead=one.overhead, other_failure_s=one.failure_s
        )
        for one in others
    }


def _candidate(mechanism: str, runs: Sequence[Record], question: Question, plain_steps: Sequence[float]) -> Candidate:
    inputs = _Inputs(runs, question, plain_steps)
    values = {
        "overhead": inputs.overhead(),
        "detect": inputs.detect(),
        "restore": inputs.restore(),
        "reform": inputs.reform(),
        "lost_work": inputs.lost_work(),
        "degraded": inputs.degraded(),
    }
    recovery_s = sum(one.value for name, one in values.items() if name not in ("overhead", "lost_work"))
    return Candidate(
        mechanism=mechanism,
        inputs=values,
        completion_s=completion_time(
            work_s=question.work_s,
            overhead=values["overhead"].value,
            recovery_s=recovery_s,
            lost_work_s=values["lost_work"].value,
            between_failures_s=question.between_failures_s,
        ),
        obstacles=tuple(_obstacles(mechanism, values, inputs, question)),
        growth=inputs.growth,
    )


class _Inputs:
    """The inputs for one mechanism: from its runs, adapted to the question.

    Saving and restoring are taken to be proportional to the state. The overhead of periodic saves is also inversely
    proportional to the interval (as the paper's section IX assumes) and to the duration of a step.
    """

    def __init__(self, runs: Sequence[Record], question: Question, plain_steps: Sequence[float]) -> None:
        self._runs, self._question = runs, question
        sizes = [run.state_bytes_per_rank for run in runs if run.state_bytes_per_rank]
        self._size = max(sizes, default=None)
        steps = plain_steps or [step for run in runs for step in run.step_seconds_before]
        self._measured_step_s = fmean(steps) if steps else 0.0
        intervals = [run.save_interval_steps for run in runs if run.save_interval_steps]
        self._interval = max(intervals, default=None)

    @property
    def state_bytes(self) -> float:
        """Of a rank."""
        return self._question.state_bytes or self._size or 0.0

    @property
    def warned(self) -> bool:
        """Whether the mechanism did nothing before a warning."""
        return any(run.emergency_seconds for run in self._runs)

    @property
    def fresh_starts(self) -> float:
        """Share of the runs that lost all work."""
        return fmean([bool(run.fresh_starts) for run in self._runs])

    def overhead(self) -> Input:
        figure = _steady_overhead if self._question.by_steps else stalled_share
        found = [value for run in self._runs if (value := figure(run)) is not None]
        if not found:
            return Input(0.0, Tag.ANALYTIC)
        value = fmean(found)
        if self._interval is None:  # nothing periodic, so nothing that grows
            return Input(value, Tag.MEASURED if self._question.by_steps else Tag.ANALYTIC)
        slower = self._step_s().value / self._measured_step_s if self._measured_step_s else 1.0
        rarer = self._steps_between().value / self._interval
        return self._scaled(value, self.growth / slower / rarer)

    def detect(self) -> Input:
        return self._given(self._question.detect_s, "detect_seconds")

    def restore(self) -> Input:
        return self._scaled(self._mean("restore_seconds"), self.growth)

    def reform(self) -> Input:
        if self._question.reform_s is not None:
            return Input(self._question.reform_s, Tag.GIVEN)
        return Input(self._mean("reform_seconds") + self._mean("respawn_seconds"), Tag.MEASURED)

    def lost_work(self) -> Input:
        """Half an interval for periodic saves, as failures strike at any time; what was measured for all others."""
        if self._interval is None:
            return Input(fmean([run.lost_seconds or 0.0 for run in self._runs]), Tag.MEASURED)
        return Input(self._steps_between().value / 2 * self._step_s().value, Tag.ANALYTIC)

    def emergency(self) -> Input:
        """The save upon a warning."""
        return self._scaled(self._mean("emergency_seconds"), self.growth)

    def degraded(self) -> Input:
        """Seconds of training that the ranks miss which a failure takes away, until they are made up for."""
        missing = [(run.world_size - (run.world_after or 0)) / len(run.faults) / run.world_size for run in self._runs]
        if not any(missing):
            return Input(0.0, Tag.MEASURED)
        given = self._question.replace_s
        return Input(fmean(missing) * (_REPLACE_S if given is None else given), Tag.ANALYTIC)

    def _step_s(self) -> Input:
        given = self._question.step_s
        return Input(self._measured_step_s, Tag.MEASURED) if given is None else Input(given, Tag.GIVEN)

    def _steps_between(self) -> Input:
        """A mechanism that saves after every step does so whatever the interval."""
        given = self._question.interval_steps
        if given is None or self._interval == 1:
            return Input(float(self._interval or 0), Tag.MEASURED)
        return Input(given, Tag.GIVEN)

    @property
    def growth(self) -> float:
        """The state in question by the measured one."""
        return self.state_bytes / self._size if self._size else 1.0

    def _given(self, given: float | None, figure: str) -> Input:
        return Input(self._mean(figure), Tag.MEASURED) if given is None else Input(given, Tag.GIVEN)

    def _mean(self, figure: str) -> float:
        found = [value for run in self._runs for value in getattr(run, figure)]
        return fmean(found) if found else 0.0

    @staticmethod
    def _scaled(value: float, factor: float) -> Input:
        if abs(factor - 1) <= _SAME_SIZE:
            return Input(value, Tag.MEASURED)
        return Input(value * factor, Tag.EXTRAPOLATED)


def _steady_overhead(run: Record) -> float | None:
    return run.steady_overhead


def _obstacles(mechanism: str, values: Mapping[str, Input], inputs: _Inputs, question: Question) -> list[str]:
    obstacles = []
    restore, overhead = values["restore"].value, values["overhead"].value
    if restore > question.restore_cap_s:
        obstacles.append(f"restores in {restore:.3g} s, more than the cap of {question.restore_cap_s:g} s")
    if overhead > question.overhead_cap:
        obstacles.append(f"costs {overhead:.1%}, more than the cap of {question.overhead_cap:.1%}")
    if inputs.fresh_starts:
        obstacles.append(f"had nothing left to restore in {inputs.fresh_starts:.0%} of its runs, and began again")
    needs = inputs.emergency().value
    if inputs.warned and question.warning_s <= needs:
        obstacles.append(f"needs a warning of more than {needs:.3g} s, and there are {question.warning_s:g} s")
    for kept, limit, where in (
        (_IN_MEMORY.get(mechanism, 0), question.host_memory_bytes, "host memory"),
        (_IN_STORAGE.get(mechanism, 0), question.storage_bytes, "storage"),
    ):
        if kept * inputs.state_bytes > limit:
            obstacles.append(f"needs {kept * inputs.state_bytes:.3g} bytes of {where}, and there are {limit:.3g}")
    return obstacles

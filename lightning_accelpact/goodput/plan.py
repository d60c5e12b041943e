"""What each way to survive failures would come to on a given cluster."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from lightning_accelpact.goodput.failures import DAY_S, FailureClass, Failures
from lightning_accelpact.goodput.method import Handling, Method, Outlook, outlook
from lightning_accelpact.goodput.presets import PAPER_BOUNDARY, PAPER_GUARD, PAPER_REPAIR_S
from lightning_accelpact.goodput.ranges import Range, bounds, likely, over
from lightning_accelpact.goodput.simulation import Arrivals, Simulation, simulate

# By how much native cached-process staging slows training down while it writes (the AccelPact paper: 17.96 %)
_ASYNC_SLOWDOWN = 0.1796
# A restart inside of the processes with NVRx, and torchft's answer to a lost link and to a lost process: as measured on
# one machine (NVRx 0.4.1 with a collective timeout of 10 s; torchft 0.2.0 with its defaults)
_IN_JOB_RESTART_S = 12.0
_TORCHFT_LINK_S = 0.1
_TORCHFT_LOSS_S = 5.0
# After this AccelPact counts a silent rank as lost (its default)
_HEARTBEAT_S = 3.0
# The paper's bound for a safe rejection
_REJECT_S = 0.1
# A fault strikes an update in its middle, on average
_HALF_UPDATE = 0.5


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """A cluster, a job on it and its failures. Where a range is allowed, the answers come with one.

    Args:
        gpus: Number of GPUs.
        update_s: Seconds per update; a range is allowed.
        state_gb: Size of a checkpoint of the whole state, GB (1e9 bytes).
        checkpoint_gb_s: What all ranks together write and read, GB/s; a range is allowed.
        failures: How often what fails.
        replica_gpus: GPUs that hold one replica of the state (a sharding group).
        relaunch_s: Seconds from the end of the processes until new ones begin to read the checkpoint: scheduler,
            imports, process groups; a range is allowed. The default is an assumption: give your own.
        hang_s: Seconds after which a job without recovery notices that its collectives hang. The default is PyTorch's
            collective timeout, which is what FailBench measures.
        notice_s: Seconds after which a launcher has noticed a lost process.
        staging_gb_s: Rate per GPU at which an asynchronous checkpoint copies the state to the host, GB/s.
        repair_s: Seconds per repair in memory; a range is allowed. The default is what the paper measures on 16 GPUs.
        boundary_share: Share of the network failures that strike between two updates; a range is allowed.
        paper_guard: Overhead of the paper's boundary guard, as a share; a range is allowed.
        guard_s: Seconds that AccelPact's boundary guard adds to an update; a range is allowed. The default was measured
            on CPUs.
        replace_s: Seconds until a replacement for a lost process runs and has joined; a range is allowed.
        transfer_gb_s: Rate at which it takes its state over from a replica peer, GB/s per GPU.

    Raises:
        ValueError: if a value is outside of what makes sense; the message names it, its range and the remedy.
    """

    gpus: int
    update_s: float | Range
    state_gb: float
    checkpoint_gb_s: float | Range
    failures: Failures
    replica_gpus: int = 8
    relaunch_s: float | Range = 300.0
    hang_s: float = 600.0
    notice_s: float = 5.0
    staging_gb_s: float = 10.0
    repair_s: float | Range = PAPER_REPAIR_S
    boundary_share: float | Range = PAPER_BOUNDARY
    paper_guard: float | Range = PAPER_GUARD
    guard_s: float | Range = Range(low=0.0, likely=0.0042, high=0.009)
    replace_s: float | Range = 30.0
    transfer_gb_s: float = 5.0

    def __post_init__(self) -> None:
        for name in ("gpus", "replica_gpus"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be a whole number of at least 1, got {getattr(self, name)!r}: give the number of GPUs"
                )
        for name in ("update_s", "state_gb", "checkpoint_gb_s", "staging_gb_s", "transfer_gb_s"):
            self._require(name, lambda value: value > 0, "more than 0", "give what you measure on your cluster")
        for name in ("relaunch_s", "hang_s", "notice_s", "repair_s", "guard_s", "replace_s"):
            self._require(name, lambda value: value >= 0, "at least 0", "give seconds, or leave it out for the default")
        self._require("boundary_share", lambda value: 0 <= value <= 1, "from 0 to 1", "0.1 is 10 %")
        self._require("paper_guard", lambda value: -1 < value < 1, "between -1 and 1", "0.002 is 0.2 %")
        if self.gpus < self.replica_gpus:
            raise ValueError(
                f"gpus must be at least replica_gpus={self.replica_gpus}, the size of one replica of the state, got"
                f" {self.gpus}: there is no replica otherwise"
            )
        if not any(bounds(self.failures.per_gpu_day)):
            raise ValueError(
                f"{self.failures.name} must be more than 0, got 0: without failures nothing is to plan for"
            )

    def _require(self, name: str, holds: Callable[[float], bool], allowed: str, remedy: str) -> None:
        value = getattr(self, name)
        if not all(math.isfinite(one) and holds(one) for one in bounds(value)):
            raise ValueError(f"{name} must be finite and {allowed}, got {value!r}: {remedy}")

    @property
    def ranges(self) -> dict[str, Range]:
        """The inputs that are ranges, and ``per_gpu_day``, if that is one."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["per_gpu_day"] = self.failures.per_gpu_day
        return {name: value for name, value in values.items() if isinstance(value, Range)}

    def at(self, **values: Any) -> PlanInputs:
        """These inputs with other values; ``per_gpu_day`` is the failures' rate."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        rate = values.pop("per_gpu_day", None)
        if rate is not None:
            given["failures"] = self.failures.with_rate(rate)
        return PlanInputs(**{**given, **values})

    def at_likely(self) -> PlanInputs:
        """These inputs without ranges."""
        return self.at(**{name: value.likely for name, value in self.ranges.items()})


def methods(inputs: PlanInputs) -> list[Method]:
    """The ways to survive failures that are compared, each at the likely values of the inputs.

    All but the asynchronous one write synchronous checkpoints, so that they differ in their recovery alone.
    """
    one = inputs.at_likely()
    write_s = one.state_gb / one.checkpoint_gb_s
    reload_s = one.relaunch_s + write_s
    per_gpu_gb = one.state_gb / one.replica_gpus
    cold = _restarts(one.notice_s + reload_s, network_s=one.hang_s + reload_s)
    half = _HALF_UPDATE * one.update_s
    replicas = one.gpus // one.replica_gpus
    rejoin_s = one.replace_s + per_gpu_gb / one.transfer_gb_s
    quick = _restarts(_HEARTBEAT_S + reload_s)
    link = Handling(in_memory=1.0, repair_s=one.repair_s, repeated_s=half)
    heal = Handling(in_memory=1.0, repair_s=_HEARTBEAT_S + rejoin_s, repeated_s=half)
    torchft_loss = Handling(in_memory=1.0, repair_s=_TORCHFT_LOSS_S + rejoin_s / replicas, repeated_s=half)
    torchft_link = Handling(in_memory=1.0, repair_s=_TORCHFT_LINK_S, repeated_s=half)
    boundary = Handling(in_memory=one.boundary_share, repair_s=one.repair_s, restart_s=_REJECT_S + reload_s)
    network, node = FailureClass.NETWORK, FailureClass.NODE
    has_replica = replicas > 1
    stall_s = per_gpu_gb / one.staging_gb_s + _ASYNC_SLOWDOWN * write_s
    ours = {"checkpoint_s": write_s, "overhead": one.guard_s / one.update_s}
    return [
        Method(name="cold restart", note="the whole job again from its last checkpoint", checkpoint_s=write_s,
               handling=cold),
        Method(name="async checkpoint", note="staged to the host, written while training goes on 18 % slower",
               checkpoint_s=stall_s, lag_s=write_s, shortest_interval_s=write_s, handling=cold),
        Method(name="in-job restart", note="NVRx: processes stay, state is reloaded", checkpoint_s=write_s,
               handling=_restarts(_IN_JOB_RESTART_S + write_s)),
        Method(name="torchft-like", note="replicas leave and join; a failure drops a batch, results differ",
               checkpoint_s=write_s, handling={
                   **cold, **({network: torchft_link, node: torchft_loss} if has_replica else {})}),
        Method(name="paper's L1", note="repairs links between two updates alone", checkpoint_s=write_s,
               overhead=one.paper_guard, handling={**cold, network: boundary}),
        Method(name="AccelPact", note="repairs links anywhere, bit for bit; a lost process restarts the job",
               handling={**quick, network: link}, **ours),
        Method(name="AccelPact + HEAL", note="as designed: also replaces lost processes, bit for bit",
               handling={**quick, network: link, **({node: heal} if has_replica else {})}, **ours),
    ]  # fmt: skip


def _restarts(seconds: float, *, network_s: float | None = None) -> dict[FailureClass, Handling]:
    """Every failure ends in a restart that takes so long."""
    every = dict.fromkeys(FailureClass, Handling(restart_s=seconds))
    return every if network_s is None else {**every, FailureClass.NETWORK: Handling(restart_s=network_s)}


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
    inputs: PlanInputs, *, simulated_days: float = 0.0, seed: int = 0, arrivals: Arrivals | None = None
) -> list[PlanRow]:
    """Compare the methods, each at its own best checkpoint interval.

    Args:
        inputs: The cluster.
        simulated_days: How long to simulate each method; 0 for not at all.
        seed: Of the simulation.
        arrivals: How failures come in the simulation; None as the failures' ``variation`` says.
    """
    one = inputs.at_likely()
    how = arrivals or Arrivals(variation=one.failures.variation)
    per_day = likely(one.failures.per_day(one.gpus))
    candidates = methods(inputs)
    return [
        PlanRow(
            method=method,
            outlook=outlook(method, failures_per_day=per_day, shares=one.failures.shares),
            goodput=_goodput(inputs, index),
            break_even=break_even(method, candidates[0], one.failures) if index else None,
            simulation=simulate(
                method, failures_per_day=per_day, shares=one.failures.shares, days=simulated_days, seed=seed,
                arrivals=how,
            ) if simulated_days else None,
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

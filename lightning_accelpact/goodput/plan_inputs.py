"""What a plan is made from: a cluster, a job on it, its failures, and what is assumed of the ways to survive them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from lightning_accelpact.goodput.failures import Failures
from lightning_accelpact.goodput.presets import PAPER_BOUNDARY, PAPER_GUARD, PAPER_REPAIR_S
from lightning_accelpact.goodput.ranges import Range, bounds


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

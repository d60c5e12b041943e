"""What repairs may do, how they are timed, and how a run that cannot be repaired ends."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum

from lightning_accelpact.recovery.action import UNRESTRICTED, Action, Ruling

FAIL_STOP_EXIT_CODE = 86
"""Exit code of a process that fail-stops; a supervisor relaunches it from the newest checkpoint."""


class FailStop(SystemExit):
    """Training cannot go on from memory. Ends the process with :data:`FAIL_STOP_EXIT_CODE` unless caught.

    Args:
        message: What happened, where, and what to resume from.
    """

    def __init__(self, message: str) -> None:
        super().__init__(FAIL_STOP_EXIT_CODE)
        self.message = message

    def __str__(self) -> str:
        return self.message


class RepairPhase(str, Enum):
    """The phases of a repair; the value names the timer in the incident."""

    # From the first sign of the fault until this rank knows of it; the peers are woken
    OBSERVE = "detect_s"
    # The device is idle, the wrapper is back at IDLE, the aborted step's frames are gone
    ADMIT_LOCAL = "admit_s"
    # Every rank's report is exchanged, and all reach the same decision
    AGREE = "agree_s"
    # REPLACE: the old communicators are taken out of service ...
    RETIRE = "retire_s"
    # ... and made again with the same members
    REBUILD = "rebuild_s"
    # Every cached reference is redirected and counted
    REBIND = "rebind_s"
    # An integer all-reduce on each new communicator, then all ranks are released together
    VALIDATE_AND_RELEASE = "validate_s"


@dataclass(frozen=True, kw_only=True)
class RepairPolicy:
    """What repairs may do and how long they may take.

    Args:
        repair_budget: Seconds from a fault in which a repair may be begun again; then the run fail-stops.
        max_repairs_per_update: Repairs begun in one update, or in one operation between two, before the run fail-stops.
        allowed: Actions that may be taken; anything else becomes ``RESTART``.
        ruling: What of them is qualified in which phase; the same on every rank.
        rebinding: Off only to show that a repair without it fails (the paper's ablation).
        guard: Off only to measure what the commit vote costs; a run without it cannot recover a fault.
    """

    repair_budget: float
    max_repairs_per_update: int
    allowed: Collection[Action] = field(default_factory=lambda: tuple(Action))
    ruling: Ruling = UNRESTRICTED
    rebinding: bool = True
    guard: bool = True

    @property
    def retries(self) -> bool:
        """Whether collectives may be run again in place, so that their inputs are kept."""
        return Action.RETRY in self.allowed and self.ruling.ever_permits(Action.RETRY)

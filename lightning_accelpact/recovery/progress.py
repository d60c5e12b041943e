"""Where this rank stands: the state that a report is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_accelpact.recovery.action import Phase, RankReport


@dataclass(kw_only=True)
class Progress:
    """The mutable state of one rank in one run.

    Args:
        rank: Global rank.
        run: Which run of this process it is (fits in the same process share communicators, not frontiers).
        generation: Number of the newest repair that it has entered.
        frontier: Updates applied so far (``F``); the current update has this number, counting from 0.
        phase: Where the rank stands inside the current update.
        micro_batch: Index of the current micro-batch inside the update, from 0.
        intact: False once an optimizer step was cut short while writing.
        obstacle: Why the current update cannot be run again; empty if it can.
        iterations: Iterations of the user's own loop that the update has begun, where only the loop can run it again.
    """

    rank: int
    run: int = 0
    generation: int = 0
    frontier: int = 0
    phase: Phase = Phase.COMMITTED
    micro_batch: int = 0
    intact: bool = True
    obstacle: str = ""
    iterations: int = 0

    def commit(self) -> None:
        """The optimizer has written: the frontier moves."""
        self.frontier += 1
        self.phase = Phase.COMMITTED
        self.micro_batch = self.iterations = 0

    def report(self, generation: int, **place: Any) -> RankReport:
        """This rank's report for a repair.

        Args:
            generation: Number of the repair.
            place: ``in_place``, ``stuck`` and ``groups`` of the report.
        """
        return RankReport(
            rank=self.rank,
            generation=generation,
            frontier=self.frontier,
            phase=self.phase,
            intact=self.intact,
            replayable=not self.obstacle,
            detail=self.obstacle,
            iterations=self.iterations,
            **place,
        )

"""The boundary guard: two-phase commit of every update, with the frontier as the log.

Between "my gradients are complete" and "the optimizer writes" each rank votes on the control plane and steps only when
all have voted. So whenever a rank is found at ``F + 1``, every other one is at least ``PREPARED`` at ``F``, and rolling
forward is always possible. The ballot is a register (see ``control.py``): it passes or is vetoed once, for everybody.
"""

from __future__ import annotations

from lightning_accelpact.recovery.control import ControlPlane
from lightning_accelpact.recovery.progress import Progress


class BoundaryGuard:
    """The commit vote of one rank.

    Args:
        control: Where the ballots are.
        progress: Names the update that is voted on.
    """

    def __init__(self, control: ControlPlane, progress: Progress) -> None:
        self._control = control
        self._progress = progress
        self._ballot = ""
        self._generation = 0

    def open(self, generation: int) -> str:
        """Name the ballot of the current update in this generation, and return it."""
        self._generation = generation
        self._ballot = self._name(self._progress.frontier)
        return self._ballot

    def _name(self, update: int) -> str:
        return f"vote/{self._progress.run}/{self._generation}/{update}"

    def cast(self) -> None:
        """Declare this rank's gradients of the current update complete."""
        # Whoever votes on this update has left the last one, and so the one before is read by nobody
        self._control.cast(self._ballot, expired=self._name(self._progress.frontier - 2))

    def passed(self) -> bool:
        """Wait for the outcome: true if every rank is prepared, false if a rank vetoed first."""
        return self._control.tally(self._ballot)

"""Leaving together: every rank ends the run at the same place, because one of them was told to."""

from __future__ import annotations

import json
from collections.abc import Callable

from lightning_accelpact.recovery.control import ControlPlane

Place = tuple[int, int, int]
"""Where a vote stands in the run: the frontier, the operations so far, and 1 for an update's vote or 0 otherwise.

Every rank comes to the same places in the same order, whatever faults it has met on its way.
"""


class Leave:
    """The agreement of one rank with all others to end the run.

    A wish is written before its rank votes, so every rank finds it once that vote has passed. A wish of a later vote may
    be there already; since it names its place, it counts nowhere earlier, on any rank.

    Args:
        control: Where wishes are written.
        run: Number of the run.
    """

    def __init__(self, control: ControlPlane, run: int) -> None:
        self._control = control
        self._key = f"leave/{run}"
        self.wanted: Callable[[], bool] = lambda: False
        self.agreed = False

    def wish(self, place: Place) -> None:
        """Before a vote: write down that this rank wants to end the run after it, if it does. The first wish counts."""
        if not self.agreed and self.wanted():
            self._control.settle(self._key, json.dumps(place))

    def look(self, place: Place) -> None:
        """After a vote has passed, or was made up for by a repair: find out whether some rank wished to leave."""
        wish = None if self.agreed else self._control.peek(self._key)
        if wish is not None and tuple(json.loads(wish)) <= place:
            self.agreed = True

"""Fail-stop: how a rank ends the run where memory cannot repair it (paper, level 2)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NoReturn

from lightning_accelpact.recovery.action import Action
from lightning_accelpact.recovery.communicator import Communicators
from lightning_accelpact.recovery.control import ControlPlane, Notice
from lightning_accelpact.recovery.inbox import Inbox
from lightning_accelpact.recovery.incident import Incident
from lightning_accelpact.recovery.line import ControlLost
from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE, FailStop
from lightning_accelpact.recovery.progress import Progress

log = logging.getLogger("accelpact")


class Stop:
    """Ends the run of one rank, or of all.

    Args:
        control: Where notices are given.
        communicators: What a rank that stops lets go of.
        progress: Where the rank stands.
        inbox: What it has been told.
        resume_hint: Says which checkpoint a restart would resume from.
    """

    def __init__(
        self,
        *,
        control: ControlPlane,
        communicators: Communicators,
        progress: Progress,
        inbox: Inbox,
        resume_hint: Callable[[], str],
    ) -> None:
        self._control = control
        self._communicators = communicators
        self._progress = progress
        self._inbox = inbox
        self._resume_hint = resume_hint
        self.told = False  # this rank has ended the run, for itself or for everybody

    def everywhere(self, reason: str, incident: Incident | None = None) -> NoReturn:
        """Fail-stop on every rank."""
        self.tell(reason)
        self.here(reason, incident)

    def tell(self, reason: str) -> None:
        """Make every other rank fail-stop, because this one ends for a reason of its own."""
        self.told = True
        newest = max(self._progress.generation, self._inbox.generation)
        rank, now = self._progress.rank, time.time()
        self.notify(Notice(generation=newest + 1, rank=rank, reason=reason, time=now, stop=True))

    def notify(self, notice: Notice) -> None:
        """Give a notice to every rank; if that cannot be done, this one will stop."""
        try:
            self._control.notify(notice)
        except ControlLost as error:
            log.error("notice %d could not be given: %s", notice.generation, error)
            self._inbox.control_lost = str(error)

    def here(self, reason: str, incident: Incident | None = None) -> NoReturn:
        """Fail-stop on this rank.

        Raises:
            FailStop: always; says what a supervisor needs to go on.
        """
        self.told = True
        if incident is not None:
            incident.action = incident.verb = Action.RESTART.value
            incident.outcome = "fail_stop"
            incident.total_s = max(incident.total_s, time.time() - incident.time)
        self._communicators.try_interrupt(before=self._progress.generation + 2)
        progress = self._progress
        where = incident or progress
        phase = incident.phase if incident else progress.phase.value
        message = (
            f"fail-stop on rank {progress.rank} in phase {phase} at frontier {where.frontier}: {reason}."
            f" To go on: {self._resume_hint()} (exit code {FAIL_STOP_EXIT_CODE})"
        )
        log.error(message)
        raise FailStop(message)

    def if_told(self, incident: Incident) -> None:
        """Obey a peer that has stopped, and stop without the control store."""
        if self._inbox.control_lost:
            self.here(f"the control store is lost: {self._inbox.control_lost}", incident)
        if (stop := self._inbox.stop) is not None:
            self.here(f"rank {stop.rank} stopped: {stop.reason}", incident)

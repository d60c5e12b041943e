"""The repair: OBSERVE, ADMIT_LOCAL, AGREE, REPLACE, REBIND, VALIDATE_AND_RELEASE (paper, six-phase state machine).

A fault during a repair starts it again at the next generation, and so does a link that is still down; after
``repair_budget`` seconds, or after ``max_repairs_per_update`` repairs of one update, it becomes ``RESTART``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_accelpact.recovery.action import Action, Decision, Phase, RankReport, decide
from lightning_accelpact.recovery.communicator import (
    CommunicatorLost,
    Communicators,
    dispose,
    is_communication_error,
)
from lightning_accelpact.recovery.control import ControlPlane, Notice, Superseded
from lightning_accelpact.recovery.fault import FaultInjector, FaultPoint
from lightning_accelpact.recovery.guard import BoundaryGuard
from lightning_accelpact.recovery.inbox import Inbox
from lightning_accelpact.recovery.incident import Incident, drop_frames, summary
from lightning_accelpact.recovery.leave import Leave, Place
from lightning_accelpact.recovery.line import ControlLost, Line
from lightning_accelpact.recovery.policy import FailStop, RepairPhase, RepairPolicy
from lightning_accelpact.recovery.progress import Progress
from lightning_accelpact.recovery.rebind import StaleReference, rebind
from lightning_accelpact.recovery.retry import Retry
from lightning_accelpact.recovery.stop import Stop
from lightning_accelpact.recovery.streams import StreamRetry
from lightning_accelpact.recovery.subject import Subject

log = logging.getLogger("accelpact")

_PATIENCE_S = 3.0  # with a pass that issues nothing, before it is interrupted
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 1.0  # between two tries of one repair


class UpdateAborted(BaseException):
    """A fault was repaired and the update must run again: unwinds the pass to whoever holds the window.

    No ``Exception``: what catches those on the way, a training step or torch's own logging, is not meant.
    """


def _no_span(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class RepairMachine:
    """Guards every update of one rank and repairs its communicators.

    Args:
        control: The control plane.
        communicators: The training communicators.
        progress: Where this rank stands; the machine moves it.
        subject: The wrapped model.
        policy: Limits and allowed actions.
        faults: Injected faults; an empty plan in production.
        resume_hint: Says which checkpoint a restart would resume from.
        span: Gives the context in which time of a named class (``guard``, ``group_repair``) is spent.
    """

    def __init__(
        self,
        *,
        control: ControlPlane,
        communicators: Communicators,
        progress: Progress,
        subject: Subject,
        policy: RepairPolicy,
        faults: FaultInjector,
        resume_hint: Callable[[], str] = lambda: "no checkpoint has been written",
        span: Callable[[str], AbstractContextManager[None]] = _no_span,
    ) -> None:
        self._control = control
        self._communicators = communicators
        self._subject = subject
        self._policy = policy
        self._span = span
        self._repairs_at: dict[tuple[int, int], int] = {}
        self._inbox = Inbox()
        self._retired: list[dist.ProcessGroup] = []
        self.progress = progress
        progress.generation = communicators.generation
        self.guard = BoundaryGuard(control, progress)
        self.faults = faults
        self.incidents: list[Incident] = []
        self.inside_update = False
        self.inside_operation = False
        self._repairing = False
        self._aborting = False  # the update must run again, and its pass has not unwound yet
        self._unwound = False  # the pass of the update that met the fault under repair has
        self._passing = False
        self._retries = policy.retries
        self.retry = self._make_retry()
        self.guarding = policy.guard  # may change between two updates, on all ranks alike
        self.on_redo: Callable[[], None] = lambda: None
        self.on_agreed_redo: Callable[[Decision], None] = lambda decision: None  # on every rank, before any on_redo
        self.leave = Leave(control, progress.run)
        self.on_leave: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None  # in the monitor thread: every rank is to fail-stop
        self._operations = 0  # that all ranks have come to
        self.stop = Stop(
            control=control,
            communicators=communicators,
            progress=progress,
            inbox=self._inbox,
            resume_hint=resume_hint,
        )

    @property
    def generation(self) -> int:
        """Number of the newest repair that this rank has entered."""
        return self.progress.generation

    def _make_retry(self) -> Retry:
        communicators = self._communicators
        if communicators.links.synchronous:
            return Retry(self)
        # Else backward passes would run in threads of the devices' own, whose collectives count as somebody else's
        torch.autograd.set_multithreading_enabled(False)
        return StreamRetry(
            self, links=communicators.links, unread=self._subject.unread, timeout=communicators.timeout
        )

    # -- called by the monitor thread

    def on_notice(self, notice: Notice, store: Line) -> None:
        """Take in a peer's notice: end what this rank waits for, and make a blocked collective return."""
        self._inbox.take(notice, store)
        if notice.stop:
            self.on_stop()
        if notice.update < 0:
            self._communicators.try_interrupt(before=notice.generation)
        elif self._goes_on:
            self._let_go_on(notice.generation)
        else:
            self._communicators.wake(before=notice.generation)

    @property
    def _goes_on(self) -> bool:
        """Whether this rank comes to the end of its passes before it takes part in the repair that it knows of."""
        notice = self._inbox.latest
        ours = notice is not None and notice.update == self.progress.frontier
        return ours and (self.passing or not self.retry.reduced)

    def _let_go_on(self, generation: int) -> None:
        """Let a pass go on to its end, as long as it gets on; one that hangs is interrupted."""
        begun = self.retry.begun

        def look() -> None:
            if self.generation < generation and self.retry.begun == begun:
                self._communicators.try_interrupt(before=generation)
            elif self.generation < generation:
                self._let_go_on(generation)

        timer = threading.Timer(_PATIENCE_S, look)
        timer.daemon = True
        timer.start()

    def on_control_lost(self, reason: str) -> None:
        """The monitor has lost the control store: wake the main thread, which fail-stops."""
        self._inbox.control_lost = reason
        self._communicators.try_interrupt(before=self.generation + 2)

    # -- called by the training loop

    @property
    def pending(self) -> bool:
        """Whether a notice has come that this rank has not acted on."""
        return self._inbox.generation > self.progress.generation or bool(self._inbox.control_lost)

    def enter(self, phase: Phase) -> None:
        """The current micro-batch has reached ``FORWARD`` or ``BACKWARD``."""
        self.progress.phase = phase
        self._passing = True

    def leave_pass(self) -> None:
        """The backward pass of a micro-batch has been run: return once its gradients are there.

        Raises:
            UpdateAborted: if a fault could only be repaired by running the update again.
            FailStop: if it could not be repaired.
        """
        self._passing = False
        self.retry.settle()

    @property
    def passing(self) -> bool:
        """Whether a forward or backward pass of an update is being run."""
        return self._passing and self.inside_update

    @property
    def reducing(self) -> bool:
        """Whether the pass is a backward."""
        return self.progress.phase is Phase.BACKWARD

    def vote(self) -> None:
        """Boundary guard: returns when the optimizer may write.

        Raises:
            UpdateAborted: if a fault was repaired meanwhile and the update has to run again.
            FailStop: if it could not be repaired.
        """
        if self._aborting:
            raise UpdateAborted
        self.leave_pass()
        verb = Action.RETRY
        while verb is Action.RETRY:
            with self._span("guard"):
                failure = self._vote()
            verb = Action.ROLL_FORWARD if failure is None else self.recover_in_place(failure)
        with self._span("guard"):
            self._look_for_a_wish(self._place(update=1))
        self.retry.committed()
        self.progress.phase = Phase.STEPPING

    def _vote(self) -> BaseException | None:
        """Vote; returns what went wrong, or ``None`` if the step is on."""
        if not self.guarding:
            return None
        try:
            self._communicators.links.settle()
            self.leave.wish(self._place(update=1))  # before peers may count on this rank's step without its vote
            self.progress.phase = Phase.PREPARED
            self.faults.fire(FaultPoint.VOTE)
            with self._voting(self.guard.open(self.generation)):
                self.guard.cast()
                if not self.guard.passed():
                    return Superseded("the vote was vetoed")
            self.faults.fire(FaultPoint.STEP)
        except (CommunicatorLost, Superseded) as error:
            return error
        except ControlLost as error:
            self.stop.here(str(error))
        return None

    def stepped(self) -> None:
        """The optimizer has written: the frontier moves. Repairs at once if a peer waits for it."""
        self.progress.commit()
        try:
            self.faults.fire(FaultPoint.BOUNDARY)
        except CommunicatorLost as error:
            self.recover(error)
        self.poll()
        self._leave_if_agreed()

    def poll(self) -> Action | None:
        """Take part in a repair that a peer has asked for; returns this rank's action, or ``None`` without one."""
        return self.recover(None) if self.pending and not self._goes_on else None

    def recovers(self, error: BaseException) -> bool:
        """Whether an exception out of the training loop is a communication fault."""
        if isinstance(error, (FailStop, ControlLost)):
            return False
        return is_communication_error(error) or isinstance(error, Superseded) or (
            isinstance(error, RuntimeError) and (self.pending or not self._communicators.links.healthy())
        )

    def recover(self, error: BaseException | None, *, unwound: bool = False) -> Action:
        """Repair; returns what this rank has to do now.

        Args:
            error: This rank's own exception, or ``None`` if it follows a peer's notice.
            unwound: Whether the exception has unwound the update's pass, so that this cannot go on.

        Raises:
            FailStop: if the decision is ``RESTART`` or the budget is used up.
        """
        self._repairing, self._unwound = True, unwound
        self._passing = self._passing and not unwound
        try:
            with self._span("group_repair"):
                incident = self._observe(error)
                drop_frames(error)
                verb = self._repair(incident)
        finally:
            self._repairing = False
        if verb is Action.REDO and self.progress.phase is not Phase.COMMITTED:  # else there is nothing to rewind yet
            self.progress.phase = Phase.COMMITTED
            self.progress.micro_batch = 0
            self._subject.reset()
            self.on_redo()
        return verb

    def recover_in_place(self, error: BaseException | None) -> Action:
        """Repair where a pass can go on; returns what this rank has to do now.

        Raises:
            UpdateAborted: if the pass cannot go on.
            FailStop: if the decision is ``RESTART`` or the budget is used up.
        """
        verb = self.recover(error)
        if verb is Action.REDO and self.inside_update:
            self._aborting = True
            raise UpdateAborted
        return verb

    def unwound(self) -> None:
        """The pass of an aborted update has unwound; what it has left on its way is cleared."""
        self._aborting = self._passing = False
        self._subject.reset()

    @property
    def collectives_count(self) -> bool:
        """Whether a collective now may run again in place: not one of a repair, nor of an operation with its own vote."""
        return (
            self._retries
            and self.guarding
            and not self._repairing
            and (self.inside_update or not self.inside_operation)
        )

    def join(self) -> None:
        """Before a collective: take part in a repair that a peer has asked for.

        Raises:
            UpdateAborted: if the pass cannot go on.
        """
        if self._aborting:
            raise UpdateAborted  # somebody has swallowed the first one
        if self.pending and not self._goes_on:
            self.recover_in_place(None)

    def drill(self) -> None:
        """A collective begins: an injected fault may strike in it."""
        self.faults.break_collective()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While micro-batches run: a collective that fails here belongs to the update's window."""
        self.inside_update = True
        try:
            yield
        finally:
            self.inside_update = False

    def confirm(self, sequence: int) -> bool:
        """Vote that this rank has finished an operation of all ranks outside an update.

        Args:
            sequence: Its number, the same on every rank.

        Returns:
            Whether every rank has finished it; otherwise a fault came first and it must run again after a repair.
        """
        self._operations = sequence
        series = f"operation/{self.progress.run}/{self.generation}"
        ballot = f"{series}/{sequence}"
        try:
            with self._voting(ballot):
                self.leave.wish(self._place())
                self._control.cast(ballot, expired=f"{series}/{sequence - 2}")
                if not self._control.tally(ballot):
                    return False
        except Superseded:
            return False
        except ControlLost as error:
            self.stop.here(str(error))
        self._look_for_a_wish(self._place())
        self._leave_if_agreed()
        return True

    def _place(self, *, update: int = 0) -> Place:
        return self.progress.frontier, self._operations, update

    def _look_for_a_wish(self, place: Place) -> None:
        if self.guarding:
            try:
                self.leave.look(place)
            except ControlLost as error:
                self.stop.here(str(error))

    def _leave_if_agreed(self) -> None:
        """Leave between two updates only: what has been computed of an update would be lost."""
        if self.leave.agreed and self.progress.phase is Phase.COMMITTED:
            self.on_leave()

    # -- the repair

    def _observe(self, error: BaseException | None) -> Incident:
        progress, notice = self.progress, self._inbox.latest if self.pending else None
        now = time.time()
        struck, self.faults.struck_at = self.faults.struck_at, None
        since = struck or (notice.time if notice else now)
        told = error is None or (notice is not None and notice.rank != progress.rank)
        incident = Incident(
            rank=progress.rank,
            number=len(self.incidents) + 1,
            generation=self.generation,
            time=now,
            source="notice" if told else "exception",
            reason=summary(error) if error is not None else (notice.reason if notice else self._inbox.control_lost),
            phase=progress.phase.value,
            frontier=progress.frontier,
            detect_s=max(0.0, now - since),
        )
        if progress.phase is Phase.STEPPING:
            progress.intact = False
        self.incidents.append(incident)
        return incident

    def _repair(self, incident: Incident) -> Action:
        begun = time.monotonic()
        reason = incident.reason
        while True:
            generation = self._call(incident, reason, begun)
            try:
                decision = self._attempt(generation, incident)
            except (CommunicatorLost, Superseded) as again:
                reason = summary(again)
                drop_frames(again)
                self._back_off(incident)
            except ControlLost as lost:
                self.stop.here(str(lost), incident)
            except RuntimeError as failure:
                if isinstance(failure, StaleReference) or not self.recovers(failure):
                    raise
                reason = summary(failure)
                drop_frames(failure)
            else:
                break
        incident.total_s = time.monotonic() - begun
        incident.outcome = "recovered"
        return self._conclude(decision, incident)

    def _call(self, incident: Incident, reason: str, begun: float) -> int:
        """OBSERVE: choose the generation of the next try, tell everybody, wake this rank's groups."""
        self.stop.if_told(incident)
        self._check_budget(incident, reason, begun)
        incident.attempts += 1
        gentle = self._gentle
        called = self._inbox.latest if self.pending else None
        if called is not None and (gentle or called.update < 0):
            generation = called.generation
        else:
            generation = max(self.generation, self._inbox.generation) + 1
            update = self.progress.frontier if gentle else -1
            self.stop.notify(
                Notice(generation=generation, rank=self.progress.rank, reason=reason, time=time.time(), update=update)
            )
        self.progress.generation = incident.generation = generation
        if not gentle:
            self._communicators.interrupt(before=generation)
        return generation

    @property
    def _gentle(self) -> bool:
        """Whether this rank can wait, with its links as they are, until its peers have come to the end of their passes."""
        return self.retry.gentle and self.inside_update and not self._unwound

    def _back_off(self, incident: Incident) -> None:
        """Between two tries of a repair: a link that is down may stay so for a while. A notice ends the wait."""
        pause = min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2 ** min(incident.attempts, 20))
        until = time.monotonic() + pause
        while not self.pending and time.monotonic() < until:
            time.sleep(_SHORTEST_PAUSE_S)

    def _check_budget(self, incident: Incident, reason: str, begun: float) -> None:
        policy, spent = self._policy, time.monotonic() - begun
        begun_here = self._repairs_at.get(self._undertaking, 0) + (incident.attempts == 0)
        self._repairs_at[self._undertaking] = begun_here
        if spent > policy.repair_budget:
            self.stop.everywhere(f"no repair within repair_budget={policy.repair_budget:g} s: {reason}", incident)
        if begun_here > policy.max_repairs_per_update:
            self.stop.everywhere(f"max_repairs_per_update={policy.max_repairs_per_update} is used up: {reason}", incident)

    @property
    def _undertaking(self) -> tuple[int, int]:
        """What repairs are counted for: an update, or what all ranks do between two, as one step of a validation."""
        between = self.progress.phase is Phase.COMMITTED
        return self.progress.frontier, self._operations if between else -1

    def _attempt(self, generation: int, incident: Incident) -> Decision:
        """One pass through the phases; raises if another fault cuts it short."""
        with self._timed(incident, RepairPhase.ADMIT_LOCAL):
            if not self._gentle:  # else nothing has been aborted yet, and a kernel may wait for its peer for ever
                self._subject.settle_device()
        with self._timed(incident, RepairPhase.AGREE):
            decision = self._agree(generation)
        incident.action, incident.verb = decision.action.value, decision.verbs[self.progress.rank].value
        if decision.action is Action.RESTART:
            self.stop.here(decision.reason, incident)
        with self._timed(incident, RepairPhase.RETIRE):
            self._retired += self._communicators.retire(generation)
            self._subject.settle_device()
        with self._inbox.interruptible(generation, lambda store: None):
            self._replace(incident)
            with self._timed(incident, RepairPhase.VALIDATE_AND_RELEASE):
                if decision.action is Action.RETRY:
                    self.retry.serve(decision.serve)
        with self._timed(incident, RepairPhase.VALIDATE_AND_RELEASE):
            self._release(generation)
        return decision

    def _agree(self, generation: int) -> Decision:
        self.progress.obstacle = self._subject.obstacle()
        topic = f"report/{generation}"
        deadline = timedelta(seconds=self._policy.repair_budget)
        with self._inbox.interruptible(generation, lambda store: self._control.abandon(topic, store=store)):
            place = {
                "in_place": self.retry.whole and not self._unwound,
                "stuck": self.retry.flying and not self.inside_update,
                "between": self.inside_operation and not self.inside_update,
                "groups": self.retry.report(),
            }
            report = self.progress.report(generation, **place).to_dict()
            answers = self._control.exchange(topic, report, deadline=deadline)
        reports = [RankReport.from_dict(answer) for answer in answers]
        return decide(reports, allowed=self._policy.allowed, ruling=self._policy.ruling)

    def _replace(self, incident: Incident) -> None:
        self.faults.fire(FaultPoint.REPAIR)
        with self._timed(incident, RepairPhase.REBUILD):
            replacements = self._communicators.rebuild()
            self.faults.fire(FaultPoint.VALIDATE)
        with self._timed(incident, RepairPhase.REBIND):
            if self._policy.rebinding:
                count = rebind(self._subject.references(), self._retired, replacements)
                incident.references, incident.stale_references = count.retired, count.stale
        with self._timed(incident, RepairPhase.VALIDATE_AND_RELEASE):
            self._communicators.validate()

    def _voting(self, ballot: str) -> AbstractContextManager[None]:
        """Take part in a ballot of this generation, which a newer notice ends with a veto."""
        return self._inbox.interruptible(self.generation, lambda store: self._control.veto(ballot, store=store))

    def _release(self, generation: int) -> None:
        ballot = f"release/{generation}"
        with self._voting(ballot):
            self._control.cast(ballot)
            if not self._control.tally(ballot):
                raise Superseded(f"the release of repair {generation} was vetoed")
        retired, self._retired = self._retired, []
        dispose(retired)

    def _conclude(self, decision: Decision, incident: Incident) -> Action:
        if decision.action is Action.REDO:
            self.retry.forget()
            self.on_agreed_redo(decision)
        self.retry.repaired()
        incident.retried_collectives += self.retry.flying
        if self.progress.rank == 0:
            log.warning(
                "update %d: %s, repaired in %.0f ms: %s",
                decision.frontier, decision.action.value, incident.total_s * 1e3, incident.reason,
            )  # fmt: skip
        return decision.verbs[self.progress.rank]

    def gather(self, message: Any, sequence: int) -> list[Any]:
        """Collect one JSON value per rank on every rank.

        Args:
            message: This rank's value.
            sequence: The operation's number, as for :meth:`confirm`.

        Raises:
            Superseded: if a fault came first, or a rank did not answer.
        """
        topic = f"gather/{self.progress.run}/{self.generation}/{sequence}"
        with self._inbox.interruptible(self.generation, lambda store: self._control.abandon(topic, store=store)):
            answers = self._control.exchange(topic, {"value": message})
        return [answer["value"] for answer in answers]

    @staticmethod
    @contextmanager
    def _timed(incident: Incident, phase: RepairPhase) -> Iterator[None]:
        begun = time.perf_counter()
        try:
            yield
        finally:
            setattr(incident, phase.value, getattr(incident, phase.value) + time.perf_counter() - begun)

"""What a rank reports after a fault, and the one pure function that decides what everybody does about it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any


class Phase(str, Enum):
    """Where a rank stands inside an update (one optimizer step with all its micro-batches)."""

    # Between two updates: everything up to the frontier is applied, nothing of the next update has begun
    COMMITTED = "committed"
    # From the first micro-batch's forward on, and again for each further micro-batch
    FORWARD = "forward"
    # From the loss until the vote: backward passes, gradient reduction, clipping
    BACKWARD = "backward"
    # The gradients are complete and the vote is cast; the optimizer has not written yet
    PREPARED = "prepared"
    # The vote has passed; the optimizer is writing
    STEPPING = "stepping"


class Action(str, Enum):
    """A recovery action, cheapest first. An incident is named after the costliest action given to any rank."""

    # Keep everything and go on: the rank stands at the highest frontier, between two updates
    PRESERVE = "preserve"
    # Apply the complete gradients that the rank holds: its peers have stepped, or only the vote was lost
    ROLL_FORWARD = "roll_forward"
    # Run the collective that failed once more, underneath the pass that waits for it; nothing unwinds
    RETRY = "retry"
    # Drop the gradients and run the same micro-batches again from host memory
    REDO = "redo"
    # Fail-stop: the supervisor relaunches from the newest checkpoint
    RESTART = "restart"

    @property
    def cost(self) -> int:
        """Position in the order of cost, 0 for the cheapest."""
        return list(Action).index(self)


@dataclass(frozen=True, kw_only=True)
class GroupReport:
    """How far one rank has come in the collectives of one of its groups.

    Args:
        finished: Collectives that it has finished; all members count the same ones.
        pending: How many after those it has begun, with the inputs at hand.
        kept: How many of the last finished ones it could run again from kept inputs.
    """

    finished: int
    pending: int = 0
    kept: int = 0


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """One rank's state at a fault, as exchanged in the AGREE phase.

    Args:
        rank: Global rank that reports.
        generation: Number of the repair that the report belongs to.
        frontier: Number of updates whose optimizer step this rank has applied (``F``).
        phase: Where the rank stands inside its current update.
        intact: Whether weights and optimizer state are whole, that is, no step was cut short while writing.
        replayable: Whether the current update can be run again from memory.
        detail: Why ``replayable`` or ``intact`` is false; empty otherwise.
        in_place: Whether its pass or vote of the current update can simply go on: no exception has unwound it.
        stuck: Whether the rank is inside a collective outside of any window, which cannot be unwound.
        between: Whether it is inside an operation of all ranks outside of an update, such as the closing vote.
        groups: How far it has come in each of its groups, by name.
        iterations: Iterations of the user's own loop that it has begun in the current update, where only the loop can
            run the update again; else 0.
    """

    rank: int
    generation: int
    frontier: int
    phase: Phase
    intact: bool = True
    replayable: bool = True
    detail: str = ""
    in_place: bool = False
    stuck: bool = False
    between: bool = False
    groups: dict[str, GroupReport] = field(default_factory=dict)
    iterations: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {**asdict(self), "phase": self.phase.value}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RankReport:
        """The inverse of :meth:`to_dict`.

        Raises:
            TypeError: if a field is missing or unknown.
            ValueError: if the phase is not one of :class:`Phase`.
        """
        report = cls(**values)
        groups = {name: GroupReport(**group) for name, group in report.groups.items()}
        return replace(report, phase=Phase(report.phase), groups=groups)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What every rank does, the same object on all of them.

    Args:
        verbs: One action per rank, in rank order.
        action: The costliest of them, which names the incident.
        frontier: The highest frontier reported (``F*``). All ranks stand on it once the roll-forwards are done, or on
            the next one if every rank rolls forward from it.
        reason: One sentence for a person.
        serve: Groups, in this order, with the numbers of the collectives that run again on every member before anybody
            goes on, since some have finished them and some have not.
        iterations: The most that any rank at ``F*`` has reported.
    """

    verbs: tuple[Action, ...]
    action: Action
    frontier: int
    reason: str
    serve: dict[str, range] = field(default_factory=dict)
    iterations: int = 0


@dataclass(frozen=True, kw_only=True)
class Ruling:
    """What the envelope says about a run: the actions that were qualified on its stack, for each phase.

    Args:
        actions: Phase -> qualified actions, best first; a phase that is left out has none.
        reason: Why there are no more, and what to do about it.
    """

    actions: Mapping[Phase, Sequence[Action]]
    reason: str = ""

    def permits(self, action: Action, phase: Phase) -> bool:
        """Whether a rank that stands in ``phase`` may be given ``action``."""
        return action in self.actions.get(phase, ())

    def ever_permits(self, action: Action) -> bool:
        """Whether there is a phase with this action."""
        return any(action in actions for actions in self.actions.values())


UNRESTRICTED = Ruling(actions={phase: tuple(Action) for phase in Phase})
"""No envelope: whatever the options allow may be taken in every phase."""


def decide(
    reports: Sequence[RankReport], *, allowed: Collection[Action] = tuple(Action), ruling: Ruling = UNRESTRICTED
) -> Decision:
    """Choose the recovery action of every rank from the reports of all of them.

    Pure: all ranks hold the same reports, so all reach the same decision. ``F*`` is the highest frontier reported.
    The boundary vote guarantees that no rank steps before all are at least ``PREPARED``; whatever contradicts that
    guarantee, and every state that memory cannot repair, is a ``RESTART`` of all ranks.

    Args:
        reports: One report per rank, sorted by rank.
        allowed: The actions that may be taken. If the decision would need another one, it becomes ``RESTART``.
        ruling: What is qualified in which phase (paper, envelope of an observation key). If it does not qualify a
            ``RETRY`` for the phase of every rank, the update runs again; if it does not qualify that, or another verb,
            the decision becomes ``RESTART``.

    Raises:
        ValueError: if ``reports`` is empty or does not hold each rank exactly once, in order.
    """
    if not reports or [report.rank for report in reports] != list(range(len(reports))):
        raise ValueError(
            f"decide() needs one report per rank in rank order, got ranks {[report.rank for report in reports]}"
        )
    frontier = max(report.frontier for report in reports)
    verbs = _verbs(reports, frontier, allowed, ruling)
    obstacle = _obstacle(reports, frontier, verbs)
    if obstacle:
        return _restart(reports, frontier, obstacle)
    forbidden = [verb for verb in verbs if verb not in allowed]
    if forbidden:
        return _restart(reports, frontier, f"{forbidden[0].value} is needed but not allowed here")
    if unqualified := _unqualified(reports, verbs, ruling):
        return _restart(reports, frontier, unqualified)
    action = max(verbs, key=lambda verb: verb.cost)
    uneven = sorted(_uneven(reports).items()) if Action.RETRY in verbs else []
    serve = {name: _in_doubt(members) for name, members in uneven}
    return Decision(
        verbs=verbs,
        action=action,
        frontier=frontier,
        reason=_REASONS[action],
        serve=serve,
        iterations=max(report.iterations for report in reports if report.frontier == frontier),
    )


_REASONS = {
    Action.PRESERVE: "every rank stands between two updates",
    Action.ROLL_FORWARD: "the gradients are complete on every rank that has not stepped",
    Action.RETRY: "every rank still holds its place, so the collectives that failed run again",
    Action.REDO: "at least one rank had not finished its gradients, so the update runs again from memory",
}


def _obstacle(reports: Sequence[RankReport], frontier: int, verbs: Sequence[Action]) -> str:
    """Why memory alone cannot bring these ranks together; empty if it can."""
    if len({report.generation for report in reports}) > 1:
        return f"the reports belong to different repairs: {sorted({report.generation for report in reports})}"
    for report in reports:
        where = f"rank {report.rank} at update {report.frontier} ({report.phase.value})"
        if not report.intact or report.phase is Phase.STEPPING:
            return f"{where} has a torn step: {report.detail or 'the optimizer was interrupted while writing'}"
        if report.frontier < frontier - 1:
            return f"{where} is {frontier - report.frontier} updates behind"
        if report.frontier < frontier and report.phase is not Phase.PREPARED:
            return f"{where} has no complete gradients although a peer has stepped"
        if Action.REDO in verbs and report.stuck:
            return f"{where} is inside a collective that is not part of an update's window"
        begun = report.frontier == frontier and report.phase is not Phase.COMMITTED
        if Action.REDO in verbs and begun and not report.replayable:
            return f"rank {report.rank} cannot run its update again: {report.detail or 'no reason given'}"
    return _parting(reports, frontier)


def _parting(reports: Sequence[RankReport], frontier: int) -> str:
    """How the ranks' own programs have parted, so that some would wait for the others for ever; empty if they have not.

    Whoever is inside the update after an operation has passed that operation, and so has everybody voted in it.
    """
    current = [report for report in reports if report.frontier == frontier]
    before = [report.rank for report in current if report.between and report.phase is Phase.COMMITTED]
    inside = [report.rank for report in current if report.phase is not Phase.COMMITTED]
    if not (before and inside):
        return ""
    return (
        f"ranks {before} wait for all ranks before update {frontier}, in a barrier or at the end of the run, and ranks"
        f" {inside} are inside it: their programs have parted, as when a loop ends earlier on some ranks than on others"
    )


def _unqualified(reports: Sequence[RankReport], verbs: Sequence[Action], ruling: Ruling) -> str:
    """Which rank would need an action that is not qualified in its phase; empty if none."""
    for report, verb in zip(reports, verbs, strict=True):
        if not ruling.permits(needed := _needed(report, verb), report.phase):
            return (
                f"{needed.value} in phase {report.phase.value} (rank {report.rank}) is not qualified on this stack:"
                f" {ruling.reason or 'the envelope has no such entry'}"
            )
    return ""


def _needed(report: RankReport, verb: Action) -> Action:
    """The action that a verb comes to: who has not begun the update only keeps what it has, unless it is in a collective."""
    waits = verb is Action.RETRY and any(group.pending for group in report.groups.values())
    return Action.PRESERVE if report.phase is Phase.COMMITTED and not waits else verb


def _verbs(
    reports: Sequence[RankReport], frontier: int, allowed: Collection[Action], ruling: Ruling
) -> tuple[Action, ...]:
    """The actions of ranks that are all intact and at most one update apart."""
    at_frontier = _verb_at_frontier(reports, frontier, allowed, ruling)
    return tuple(at_frontier if report.frontier == frontier else Action.ROLL_FORWARD for report in reports)


def _verb_at_frontier(
    reports: Sequence[RankReport], frontier: int, allowed: Collection[Action], ruling: Ruling
) -> Action:
    current = [report for report in reports if report.frontier == frontier]
    if len(current) == len(reports) and all(report.phase is Phase.PREPARED for report in current):
        return Action.ROLL_FORWARD  # only the vote was lost
    in_flight = any(group.pending for report in reports for group in report.groups.values())
    if not in_flight and all(report.phase is Phase.COMMITTED for report in current):
        return Action.PRESERVE
    retries = Action.RETRY in allowed and not _unqualified(current, [Action.RETRY] * len(current), ruling)
    return Action.RETRY if retries and _can_go_on(reports, current) else Action.REDO


def _can_go_on(reports: Sequence[RankReport], current: Sequence[RankReport]) -> bool:
    """Whether no pass was unwound, and every collective that only some have finished can be run again by all."""
    if not all(report.in_place for report in current if report.phase is not Phase.COMMITTED):
        return False
    return all(_can_be_served(members) for members in _uneven(reports).values())


def _uneven(reports: Sequence[RankReport]) -> dict[str, list[GroupReport]]:
    """The groups whose members have not finished the same number of collectives."""
    members: dict[str, list[GroupReport]] = {}
    for report in reports:
        for name, group in report.groups.items():
            members.setdefault(name, []).append(group)
    return {name: groups for name, groups in members.items() if len({group.finished for group in groups}) > 1}


def _in_doubt(members: Sequence[GroupReport]) -> range:
    """The collectives that some members have finished and some have not."""
    finished = [group.finished for group in members]
    return range(min(finished) + 1, max(finished) + 1)


def _can_be_served(members: Sequence[GroupReport]) -> bool:
    """Whether whoever has finished one of those in doubt kept its input, and the others have begun it."""
    doubt = _in_doubt(members)
    lowest, highest = doubt.start - 1, doubt.stop - 1
    return all(
        group.kept >= group.finished - lowest and group.pending >= highest - group.finished for group in members
    )


def _restart(reports: Sequence[RankReport], frontier: int, reason: str) -> Decision:
    return Decision(
        verbs=(Action.RESTART,) * len(reports), action=Action.RESTART, frontier=frontier, reason=reason
    )

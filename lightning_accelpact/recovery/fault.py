"""Deterministic fault injection, keyed by rank, update and point in the update."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from lightning_accelpact.recovery.communicator import CommunicatorLost
from lightning_accelpact.recovery.progress import Progress


class FaultPoint(str, Enum):
    """Where in an update a fault strikes."""

    # At the window's start, before the first micro-batch's forward
    START = "start"
    # Inside a forward pass, at the middle block
    FORWARD = "forward"
    # Inside a backward pass, at the middle block
    BACKWARD = "backward"
    # Between the last reduce-scatter of an update and its replication all-reduce
    ALL_REDUCE = "all_reduce"
    # Gradients complete, this rank's vote not cast yet
    VOTE = "vote"
    # The vote has passed, the optimizer has not begun to write
    STEP = "step"
    # Between two updates; ``update`` counts those applied
    BOUNDARY = "boundary"
    # In a repair that is under way, when the communicators are about to be made again
    REPAIR = "repair"
    # In a repair, when they have been made again and are about to be validated
    VALIDATE = "validate"


class FaultKind(str, Enum):
    """What happens there."""

    # An exception in the victim's own thread
    EXCEPTION = "exception"
    # The victim's connections are shut down, and its next collective fails
    SOCKETS = "sockets"
    # The victim's next collective fails, and its connections stay up
    COLLECTIVE = "collective"


class InjectedFault(CommunicatorLost):
    """The exception of the kinds that raise one."""


_SPEC = re.compile(r"(?P<point>\w+)@(?P<update>\d+)(\.(?P<micro>\d+))?(:(?P<rank>\d+))?(:(?P<kind>\w+))?")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, which strikes once.

    Args:
        point: Where in the update.
        update: Number of the update, from 0; for ``boundary`` the number of updates applied.
        rank: The victim.
        kind: What happens.
        micro_batch: Which micro-batch of the update; ``None`` for the last one.
        group: Whose sockets: ``world``, ``replicate``, ``shard``, or ``None`` for all.
    """

    point: FaultPoint
    update: int
    rank: int = 0
    kind: FaultKind = FaultKind.SOCKETS
    micro_batch: int | None = None
    group: str | None = None

    def __str__(self) -> str:
        """The text that :meth:`parse` reads, which has no place for ``group``."""
        micro_batch = "" if self.micro_batch is None else f".{self.micro_batch}"
        return f"{self.point.value}@{self.update}{micro_batch}:{self.rank}:{self.kind.value}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``POINT@UPDATE[.MICRO][:RANK][:KIND]``, such as ``backward@3:3`` or ``vote@2:0:exception``.

        Raises:
            ValueError: if the text has another form, or names no point or kind that there is.
        """
        match = _SPEC.fullmatch(text)
        points, kinds = [point.value for point in FaultPoint], [kind.value for kind in FaultKind]
        if not match or match["point"] not in points or (match["kind"] or kinds[0]) not in kinds:
            raise ValueError(
                f"a fault is POINT@UPDATE[.MICRO][:RANK][:KIND] with POINT one of {points} and KIND one of {kinds},"
                f" such as backward@3:3; got {text!r}"
            )
        return cls(
            point=FaultPoint(match["point"]),
            update=int(match["update"]),
            rank=int(match["rank"] or 0),
            kind=FaultKind(match["kind"] or FaultKind.SOCKETS),
            micro_batch=int(match["micro"]) if match["micro"] else None,
        )


class FaultPlan:
    """The faults of one run on one rank; empty in production.

    Args:
        faults: What is to happen, on any rank.
    """

    def __init__(self, faults: Iterable[Fault] = ()) -> None:
        self.faults: Sequence[Fault] = tuple(faults)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> FaultPlan:
        """A plan from command-line texts; see :meth:`Fault.parse`."""
        return cls(map(Fault.parse, texts))

    def validate(self, world_size: int) -> None:
        """Refuse a victim that does not exist.

        Raises:
            ValueError: names the fault and the ranks that exist.
        """
        for fault in self.faults:
            if not 0 <= fault.rank < world_size:
                raise ValueError(f"{fault} names rank {fault.rank}; the ranks of this run are 0 to {world_size - 1}")


class FaultInjector:
    """Strikes this rank's faults of a plan.

    Args:
        plan: The faults of the run.
        progress: Where this rank stands.
        cut: Shuts this rank's connections; takes the names of the groups or ``None`` for all.
        clock: Wall clock for the moment of the strike.
    """

    def __init__(
        self,
        plan: FaultPlan,
        *,
        progress: Progress,
        cut: Callable[[list[str] | None], int],
        clock: Callable[[], float],
    ) -> None:
        self._pending = [fault for fault in plan.faults if fault.rank == progress.rank]
        self._progress = progress
        self._cut = cut
        self._clock = clock
        self._breaking: InjectedFault | None = None
        self.struck_at: float | None = None

    def __bool__(self) -> bool:
        return bool(self._pending)

    @property
    def pending(self) -> list[Fault]:
        """This rank's faults that have not struck."""
        return list(self._pending)

    def wants(self, *points: FaultPoint) -> bool:
        """Whether a fault at one of these points is still to come."""
        return any(fault.point in points for fault in self._pending)

    def fire(self, point: FaultPoint, *, last: bool = True) -> None:
        """Strike if a fault is due here.

        Args:
            point: Where the rank stands.
            last: Whether this is the update's last micro-batch.

        Raises:
            InjectedFault: for a fault of the exception kind.
        """
        for fault in self._pending:
            if fault.point is point and self._due(fault, last):
                self._pending.remove(fault)
                self.strike(fault)
                return

    def _due(self, fault: Fault, last: bool) -> bool:
        here = self._progress
        if fault.update != here.frontier:
            return False
        if fault.point in (FaultPoint.FORWARD, FaultPoint.BACKWARD):
            return last if fault.micro_batch is None else fault.micro_batch == here.micro_batch
        return True

    def strike(self, fault: Fault) -> None:
        """Strike now, wherever the rank stands; for drills at places that have no :class:`FaultPoint`.

        Raises:
            InjectedFault: for a fault of the exception kind.
        """
        self.struck_at = self._clock()
        if fault.kind is FaultKind.SOCKETS:
            self._cut([fault.group] if fault.group else None)
            return
        error = InjectedFault(f"injected: {fault.point.value} of update {fault.update} on rank {fault.rank}")
        if fault.kind is FaultKind.EXCEPTION:
            raise error
        self._breaking = error

    def break_collective(self) -> None:
        """A collective begins: let it fail if a fault of that kind has struck.

        Raises:
            InjectedFault: that fault's.
        """
        error, self._breaking = self._breaking, None
        if error is not None:
            self.struck_at = self._clock()
            raise error

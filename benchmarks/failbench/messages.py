"""What the coordinator and the members say to each other, over one pipe for each member."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.failbench.mechanisms.plan import Report

# Times are seconds of time.monotonic(), which all processes of a machine share.


@dataclass(frozen=True)
class Form:
    """To members: train together from here on.

    Args:
        generation: How many formations there were before.
        members: In the order of their ranks.
        spares: Living members that the architecture has no use for now.
        reports: Of all that survived the last generation; empty at the start.
    """

    generation: int
    members: tuple[int, ...]
    spares: tuple[int, ...] = ()
    reports: tuple[Report, ...] = ()


@dataclass(frozen=True)
class Leave:
    """To members: a rank of this generation is lost; leave its groups."""

    generation: int


@dataclass(frozen=True)
class Warn:
    """To members: these ranks will fail; save when so many steps are done."""

    victims: tuple[int, ...]
    step: int


@dataclass(frozen=True)
class Proceed:
    """To a warned member: all others know."""


@dataclass(frozen=True)
class Stop:
    """To members: the run is over."""


@dataclass(frozen=True)
class Ready:
    """From a new member: it has started."""

    at: float


@dataclass(frozen=True)
class Warned:
    """From a member: it got its warning at the beginning of a step."""

    step: int


@dataclass(frozen=True)
class Confirmed:
    """From a member: it has received the warning."""


@dataclass(frozen=True)
class Heard:
    """From a member: it has received the order to leave, and lives."""

    generation: int


@dataclass(frozen=True)
class Striking:
    """From a victim, right before it: its fault strikes."""

    planned: float
    at: float


@dataclass(frozen=True)
class StepLog:
    """One step as a member saw it.

    Args:
        step: Steps that were done before.
        begin: Time.
        end: Time; what was saved after the step is contained.
        loss: Of its batch.
        samples: Of all ranks together.
        saved: Seconds that it stood still for a save.
    """

    step: int
    begin: float
    end: float
    loss: float
    samples: int
    saved: float


@dataclass(frozen=True)
class Restored:
    """From a member: it trains.

    Args:
        generation: Of its formation.
        formed: When its groups and its part of the model were made.
        restored: When its state was in place.
        step: At which training goes on.
        reason: Why the mechanism did not work as it is meant to; empty if it did.
        fresh: Whether it began again.
    """

    generation: int
    formed: float
    restored: float
    step: int
    reason: str
    fresh: bool


@dataclass(frozen=True)
class Left:
    """From a member: it has left its groups.

    Args:
        generation: Theirs.
        known: When it knew of the fault.
        noticed: Whether it noticed by itself.
        error: How.
        report: What it could restore from; None if it is new and holds nothing yet.
        log: Steps so far in its life.
        emergency: Seconds for each save upon a warning.
        state_bytes: Size of its state.
    """

    generation: int
    known: float
    noticed: bool
    error: str
    report: Report | None
    state_bytes: int
    log: tuple[StepLog, ...]
    emergency: tuple[float, ...]


@dataclass(frozen=True)
class LostPeer:
    """From a member: it goes on without another one."""

    member: int
    known: float


@dataclass(frozen=True)
class Done:
    """From a member: it has done its last step."""

    generation: int
    weights_sha256: str
    state_bytes: int
    log: tuple[StepLog, ...]
    emergency: tuple[float, ...]


@dataclass(frozen=True)
class Failed:
    """From a member: an error that has nothing to do with a fault."""

    error: str

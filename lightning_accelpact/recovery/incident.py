"""The record of one incident on one rank: what failed, what was decided, and what each phase of the repair took."""

from __future__ import annotations

import re
import traceback
from dataclasses import asdict, dataclass
from typing import Any

_SOURCE_PLACE = re.compile(r"^\[[^\]]*\]\s*")


@dataclass(kw_only=True)
class Incident:
    """One fault and its repair, as one rank saw it. All durations are seconds.

    The phase timers are the columns of the paper's Table V (admission, agreement, retirement, rebuild, rebinding,
    validation); an incident whose repair had to start again adds its attempts up.

    Args:
        rank: Global rank that wrote the record.
        number: 1 for the first incident of the run on this rank.
        generation: Number of the repair that ended it.
        time: Wall clock (Unix time) at which this rank observed the fault.
        source: How this rank learnt of it: ``exception`` (its own collective or an injected fault) or ``notice`` (a
            peer told it).
        reason: The error's type and first line.
        phase: Where this rank stood (a value of :class:`~.action.Phase`).
        frontier: Updates that this rank had applied.
        action: The incident's name, the costliest action given to any rank; empty until decided.
        verb: This rank's own action.
        detect_s: From the first sign of the fault anywhere (the injected fault itself, else the first rank's
            exception) until this rank observed it. Compares wall clocks across nodes and is cut off at 0.
        admit_s: Local admission: device idle, interrupted communicators and iteration state dropped.
        agree_s: Exchange of the reports.
        retire_s: Retirement of the old communicators.
        rebuild_s: Their replacement.
        rebind_s: Redirecting the framework's cached references.
        validate_s: Integer all-reduce on each new communicator and the release.
        total_s: From observation to release.
        redo_s: Work of the aborted update that was thrown away, and so is done twice.
        redone_micro_batches: How many this rank ran again.
        retried_collectives: How many collectives this rank has run again for itself, underneath a pass that went on.
        references: References found that named a retired communicator, all of which were redirected.
        stale_references: References that still named one afterwards (0 or the repair fails).
        attempts: Repairs begun for this incident; more than 1 if a fault hit the repair itself.
        outcome: ``recovered``, ``fail_stop``, or empty while it is under way.
    """

    rank: int
    number: int
    generation: int
    time: float
    source: str
    reason: str
    phase: str
    frontier: int
    action: str = ""
    verb: str = ""
    detect_s: float = 0.0
    admit_s: float = 0.0
    agree_s: float = 0.0
    retire_s: float = 0.0
    rebuild_s: float = 0.0
    rebind_s: float = 0.0
    validate_s: float = 0.0
    total_s: float = 0.0
    redo_s: float = 0.0
    redone_micro_batches: int = 0
    retried_collectives: int = 0
    references: int = 0
    stale_references: int = 0
    attempts: int = 0
    outcome: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        return asdict(self)


def summary(error: BaseException) -> str:
    """The error's type and first sentence, without the place in the library's source that Gloo puts in front."""
    text = _SOURCE_PLACE.sub("", str(error)).splitlines()
    return f"{type(error).__name__}: {text[0].split('. ')[0] if text else ''}"


def drop_frames(error: BaseException | None) -> None:
    """Let go of the aborted step: its frames keep activations and the retired communicator alive."""
    while error is not None:
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error.__context__, error = None, error.__context__

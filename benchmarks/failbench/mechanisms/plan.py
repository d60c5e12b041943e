"""The survivors' election: from all reports follows, the same on every rank, what the state is restored from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a survivor holds.

    Args:
        member: Who.
        step: Steps that its own state has behind it.
        shard: Which part of the training state that is.
        snapshots: Steps of the snapshots in its memory, by the member whose they are.
        saved: Steps of which it has found complete checkpoints on disk.
        phase: Where it stood in its step, for a mechanism to which that matters.
    """

    member: int
    step: int
    shard: str
    snapshots: Mapping[int, Sequence[int]] = field(default_factory=dict)
    saved: Sequence[int] = ()
    phase: str = ""


@dataclass(frozen=True)
class Plan:
    """What is restored.

    Args:
        step: Steps that training will have behind it.
        sources: For each member whose state comes from a survivor's memory, that survivor.
        steps: For each member the step of the snapshot that it restores, if there are snapshots.
        witness: The survivor that tells what no replica holds, if the mechanism has one.
        reason: Why not as the mechanism is meant to; empty if so.
        fresh: Training begins again with its first weights.
    """

    step: int
    sources: Mapping[int, int] = field(default_factory=dict)
    steps: Mapping[int, int] = field(default_factory=dict)
    witness: int = -1
    reason: str = ""
    fresh: bool = False


def from_the_beginning(reason: str) -> Plan:
    """Nothing can be restored."""
    return Plan(0, reason=f"{reason}: training began again at step 0", fresh=True)


def newest(candidates: Iterable[Iterable[int]]) -> int | None:
    """The newest step that all have."""
    sets = [set(one) for one in candidates]
    common = set.intersection(*sets) if sets else set()
    return max(common, default=None)

"""What the coordinator has seen of a run, from which the record is made."""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.failbench.messages import Done, Left, LostPeer, Restored, StepLog, Striking


@dataclass
class Recovery:
    """From a loss until training goes on.

    Args:
        lost: Members that were lost.
        left: What the survivors said.
        spawned: When new processes were asked for.
        ready: When the last of them had started.
        formed_from: When members were told to form groups.
        restored: What members said when they trained again.
    """

    lost: tuple[int, ...]
    left: dict[int, Left]
    spawned: float | None = None
    ready: float | None = None
    formed_from: float | None = None
    restored: dict[int, Restored] = field(default_factory=dict)


@dataclass
class Timeline:
    """Everything in the order in which it came.

    Args:
        began: When the first formation trained.
        strikes: By victim.
        recoveries: All of them; of a run that halted the last one was not carried out.
        lost_peers: Told by members that went on natively.
        done: By member.
        world_after: Members that trained at the end.
    """

    began: float = 0.0
    strikes: dict[int, Striking] = field(default_factory=dict)
    recoveries: list[Recovery] = field(default_factory=list)
    lost_peers: list[LostPeer] = field(default_factory=list)
    done: dict[int, Done] = field(default_factory=dict)
    world_after: int = 0

    @property
    def log(self) -> tuple[StepLog, ...]:
        """The steps as member 0 saw them, which is never struck."""
        if 0 in self.done:
            return self.done[0].log
        return self.recoveries[-1].left[0].log if self.recoveries and 0 in self.recoveries[-1].left else ()

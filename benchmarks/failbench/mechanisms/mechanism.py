"""The base of all mechanisms: what they save, and what they restore."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from benchmarks.failbench.mechanisms.plan import Plan, Report, from_the_beginning

if TYPE_CHECKING:
    from benchmarks.failbench.architectures.architecture import Architecture


class Mechanism(ABC):
    """One rank's part of a mechanism; it lives as long as its process, while architectures come and go.

    Args:
        member: This process.
        interval: Steps from one periodic save to the next.
        folder: On a disk that all ranks share.
    """

    recovers: ClassVar[bool] = True
    """Whether training goes on after a loss."""
    respawns: ClassVar[bool] = True
    """Whether lost ranks are replaced by new processes; else those that are left go on."""
    keeps_batch: ClassVar[bool] = False
    """Whether fewer ranks share the same batch, or train on a smaller one."""
    needs_warning: ClassVar[bool] = False
    """Whether it acts upon the warning before a fault."""
    periodic: ClassVar[bool] = False
    """Whether it saves in advance."""

    def __init__(self, *, member: int, interval: int, folder: Path) -> None:
        self.member = member
        self.interval = interval
        self.folder = folder
        self.architecture: Architecture

    @classmethod
    def why_not(cls, architecture: type[Architecture]) -> str | None:
        """Why it cannot work on an architecture; None if it can."""
        return None

    @classmethod
    def save_interval(cls, interval: int) -> int | None:
        """Steps from one save in advance to the next, of a preset's interval; None if there is none."""
        return interval if cls.periodic else None

    def attach(self, architecture: Architecture) -> None:
        """Work for the ranks of a new formation; with all of them."""
        self.architecture = architecture

    def after_step(self, step: int) -> bool:
        """Between two steps, with all ranks.

        Args:
            step: Steps that are done.

        Returns:
            Whether something was saved.
        """
        interval = self.save_interval(self.interval)
        if interval is None or step % interval:
            return False
        self.save()
        return True

    def save(self) -> None:
        """Save the state of now; with all ranks."""

    def report(self) -> Report:
        """What this rank could restore from."""
        architecture = self.architecture
        world = architecture.world
        return Report(
            member=self.member,
            step=architecture.state().step,
            shard=architecture.shard(world.rank, world.members),
        )

    @classmethod
    def plan(cls, architecture: type[Architecture], members: Sequence[int], reports: Sequence[Report]) -> Plan:
        """Decide what is restored: a pure function, so that all ranks decide the same.

        Args:
            architecture: What is trained.
            members: That will train, in the order of their new ranks.
            reports: Of all survivors.
        """
        return from_the_beginning("nothing was saved")

    def restore(self, plan: Plan) -> None:
        """Carry a plan out that is not ``fresh``; with all ranks."""

    def hold(self, victims: Sequence[int]) -> None:
        """After a save upon a warning, with all ranks: wait for the fault; what is trained until then would be lost.

        Args:
            victims: Members that will fail.
        """

    def protect(self) -> None:
        """After a restore, with all ranks: what is needed before the next fault may come."""

    def close(self) -> None:
        """Before a rank ends its training."""

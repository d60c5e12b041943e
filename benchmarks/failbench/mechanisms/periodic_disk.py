"""FT1: checkpoints on disk at an interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from benchmarks.failbench.mechanisms.checkpoints import Checkpoints
from benchmarks.failbench.mechanisms.mechanism import Mechanism
from benchmarks.failbench.mechanisms.plan import Plan, Report, from_the_beginning, newest
from benchmarks.failbench.state import State

if TYPE_CHECKING:
    from benchmarks.failbench.architectures.architecture import Architecture


class PeriodicDisk(Mechanism):
    """The first rank of each shard writes model and optimizer, as in the paper without a barrier (section VII-C).

    Random generator and data position differ from rank to rank; each writes its own. A checkpoint counts once all its
    parts are there.
    """

    periodic = True

    def save(self) -> None:
        self.write(self.architecture.state())

    def write(self, state: State) -> None:
        """Write this rank's parts of a checkpoint."""
        checkpoints, shards = self._checkpoints(), self._shards()
        shard = shards[self.architecture.world.rank]
        if shards.index(shard) == self.architecture.world.rank:
            checkpoints.write(state.step, shard, state.tensors)
        checkpoints.write(state.step, f"member {self.member}", state.own)

    def report(self) -> Report:
        parts = [*self._shards(), *(f"member {member}" for member in self.architecture.world.members)]
        return replace(super().report(), saved=self._checkpoints().complete(parts))

    @classmethod
    def plan(cls, architecture: type[Architecture], members: Sequence[int], reports: Sequence[Report]) -> Plan:
        step = newest(report.saved for report in reports)
        return from_the_beginning("no checkpoint was complete") if step is None else Plan(step)

    def restore(self, plan: Plan) -> None:
        checkpoints = self._checkpoints()
        tensors = checkpoints.read(plan.step, self._shards()[self.architecture.world.rank])
        own = checkpoints.read(plan.step, f"member {self.member}")
        self.architecture.load(State(tensors=tensors, **own))

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder)

    def _shards(self) -> list[str]:
        members = self.architecture.world.members
        return [self.architecture.shard(rank, members) for rank in range(len(members))]

"""State from the memory of survivors that hold a replica: what FT7, FT8 and FT10 have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from benchmarks.failbench.mechanisms.mechanism import Mechanism
from benchmarks.failbench.mechanisms.plan import Plan, Report, from_the_beginning, newest
from benchmarks.failbench.world import gather_numbers

if TYPE_CHECKING:
    from benchmarks.failbench.architectures.architecture import Architecture


class Survivors(Mechanism):
    """Nothing is saved: of each shard one survivor is elected, and the others take their state from it."""

    def attach(self, architecture: Architecture) -> None:
        self._held = self.architecture.state() if hasattr(self, "architecture") else None
        super().attach(architecture)

    @classmethod
    def plan(cls, architecture: type[Architecture], members: Sequence[int], reports: Sequence[Report]) -> Plan:
        present = [report for report in reports if report.member in members]
        if architecture.independent:
            return Plan(min(report.step for report in present), {one.member: one.member for one in present})
        shards = {member: architecture.shard(rank, members) for rank, member in enumerate(members)}
        needed = sorted(set(shards.values()) - architecture.derived)
        holders = {shard: [one for one in present if one.shard == shard] for shard in needed}
        unheld = [shard for shard, found in holders.items() if not found]
        if unheld:
            return from_the_beginning(f"no survivor holds {_listed(unheld)}")
        step = newest([one.step for one in found] for found in holders.values())
        if step is None:
            return from_the_beginning("the fault came while some shards had been updated and others not")
        elected = {shard: _elected(found, step) for shard, found in holders.items()}
        return Plan(step, {member: elected[shard] for member, shard in shards.items() if shard in elected})

    def restore(self, plan: Plan) -> None:
        """Survivors keep their random generators; only tensors and data position come from those that are elected."""
        world = self.architecture.world
        own = self._held or self.architecture.state()
        lengths = gather_numbers(len(self.architecture.state().pack()))
        positions = gather_numbers(own.position if self._held and own.step == plan.step else -1)
        source = plan.sources.get(self.member)
        works = [
            dist.isend(own.pack(), world.members.index(member))
            for member, holder in plan.sources.items()
            if holder == self.member != member
        ]
        if source is not None and source != self.member:
            packed = torch.empty(lengths[world.rank], dtype=torch.uint8)
            dist.recv(packed, world.members.index(source))
            tensors = self.architecture.state().unpack(packed).tensors
        else:
            tensors = own.tensors if source is not None else self.architecture.state().tensors
        for work in works:
            work.wait()
        generator = own.generator if self._held else self.architecture.state().generator
        self.architecture.load(type(own)(plan.step, max(positions), generator, tensors))


def _listed(shards: Sequence[str]) -> str:
    return shards[0] if len(shards) == 1 else f"{shards[0]}, nor {len(shards) - 1} others"


def _elected(reports: Sequence[Report], step: int) -> int:
    return min(report.member for report in reports if report.step == step)

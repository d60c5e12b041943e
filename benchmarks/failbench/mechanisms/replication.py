"""Snapshots of a rank's state in the memory of its peers: what FT2, FT4, FT5 and FT6 have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.failbench.mechanisms.mechanism import Mechanism
from benchmarks.failbench.mechanisms.plan import Plan, Report, from_the_beginning, newest
from benchmarks.failbench.world import gather_numbers

if TYPE_CHECKING:
    from benchmarks.failbench.architectures.architecture import Architecture

_KEPT = 2  # of each owner: a fault may come when only some ranks have the newest


class Replication(Mechanism):
    """Each rank keeps a snapshot of its own state, and sends it to the ranks that follow it in a ring.

    After a restore everything is sent again, since the replacements hold nothing of their peers' yet.
    """

    peers: ClassVar[int] = 1
    """How many ranks hold a copy."""

    def attach(self, architecture: Architecture) -> None:
        super().attach(architecture)
        self._snapshots: dict[int, dict[int, Tensor]] = getattr(self, "_snapshots", {})
        self._lengths = gather_numbers(len(architecture.state().pack()))

    def save(self) -> None:
        state = self.architecture.state()
        packed = state.pack()
        self._keep(self.member, packed)
        world = self.architecture.world
        for distance in range(1, min(self.peers, world.size - 1) + 1):
            owner = (world.rank - distance) % world.size
            incoming = torch.empty(self._lengths[owner], dtype=torch.uint8)
            sent = dist.isend(packed, (world.rank + distance) % world.size)
            dist.recv(incoming, owner)
            sent.wait()  # unlike a gradient's, a state's copy would take too much memory
            self._keep(world.members[owner], incoming)

    def report(self) -> Report:
        held = {owner: tuple(snapshots) for owner, snapshots in self._snapshots.items()}
        return replace(super().report(), snapshots=held)

    @classmethod
    def plan(cls, architecture: type[Architecture], members: Sequence[int], reports: Sequence[Report]) -> Plan:
        steps = {owner: _held(owner, reports) for owner in members}
        unheld = [owner for owner, found in steps.items() if not found]
        if unheld:
            return from_the_beginning(f"nobody holds a snapshot of {_listed(unheld)} any more")
        common = newest(steps.values())
        if common is None and not architecture.independent:
            return from_the_beginning("no step has a snapshot of every rank")
        chosen = {owner: max(found) if common is None else common for owner, found in steps.items()}
        sources = {owner: _holder(owner, step, reports) for owner, step in chosen.items()}
        reason = "no step had a snapshot of every rank, so each took its newest" if common is None else ""
        return Plan(min(chosen.values()), sources, steps=chosen, reason=reason)

    def restore(self, plan: Plan) -> None:
        world = self.architecture.world
        self._snapshots = {
            owner: {step: one for step, one in snapshots.items() if step <= plan.steps[owner]}
            for owner, snapshots in self._snapshots.items()
            if owner in plan.steps
        }
        works = []
        packed = None
        for owner, source in plan.sources.items():
            if source == self.member:
                found = self._snapshots[owner][plan.steps[owner]]
                if owner == self.member:
                    packed = found
                else:
                    works.append(dist.isend(found, world.members.index(owner)))
            elif owner == self.member:
                packed = torch.empty(self._lengths[world.rank], dtype=torch.uint8)
                dist.recv(packed, world.members.index(source))
        for work in works:
            work.wait()
        assert packed is not None, "the plan has a source for each member"
        state = self.architecture.state().unpack(packed)
        self.architecture.load(replace(state, step=plan.step))

    def protect(self) -> None:
        self.save()

    def _keep(self, owner: int, packed: Tensor) -> None:
        step = int(packed[:8].clone().view(torch.int64))
        snapshots = self._snapshots.setdefault(owner, {})
        snapshots[step] = packed
        for old in sorted(snapshots)[:-_KEPT]:
            del snapshots[old]


def _held(owner: int, reports: Sequence[Report]) -> set[int]:
    return {step for report in reports for step in report.snapshots.get(owner, ())}


def _holder(owner: int, step: int, reports: Sequence[Report]) -> int:
    """The owner itself, or else the first that has it."""
    holders = [report.member for report in reports if step in report.snapshots.get(owner, ())]
    return owner if owner in holders else holders[0]


def _listed(members: Sequence[int]) -> str:
    return f"rank{'s' if len(members) > 1 else ''} {', '.join(map(str, members))}"

"""FT10: this project's rules, where the architecture has replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.failbench.mechanisms.plan import Plan, Report, from_the_beginning
from benchmarks.failbench.mechanisms.survivors import Survivors
from lightning_accelpact.recovery.action import Action, Phase, RankReport, decide

if TYPE_CHECKING:
    from benchmarks.failbench.architectures.architecture import Architecture

# The error that told of the loss has unwound the pass: it cannot go on underneath
_ALLOWED = tuple(action for action in Action if action is not Action.RETRY)


class AccelPact(Survivors):
    """No saves and no lost step: a vote before each step, and after a loss what ``decide()`` says.

    What it takes of AccelPact are the report of a rank and the function that decides over all reports
    (``lightning_accelpact.recovery.action``). AccelPact's runtime does not replace a lost process; here FailBench does:
    the new process takes model and optimizer from a replica at the frontier, and its random generator from the last
    vote, which has carried those of all ranks.
    """

    def attach(self, architecture: Architecture) -> None:
        self._before: Architecture | None = getattr(self, "architecture", None)
        super().attach(architecture)
        self._phase = Phase.BACKWARD
        self._generators: list[Tensor] = getattr(self, "_generators", [])
        architecture.vote = self._vote

    @classmethod
    def why_not(cls, architecture: type[Architecture]) -> str | None:
        if architecture.independent:
            return "No two ranks hold the same state, so nobody could hand a lost rank's state to its replacement."
        shards = [architecture.shard(rank, range(8)) for rank in range(8)]
        lone = [shard for shard in shards[1:] if shards.count(shard) == 1]  # rank 0 is never struck
        return f"Nobody else holds {lone[0]}, so nobody could hand it to a replacement." if lone else None

    def after_step(self, step: int) -> bool:
        self._phase = Phase.BACKWARD
        return False

    def _vote(self) -> None:
        """This rank's gradients are complete: go on to step once they are everywhere."""
        self._phase, self._own = Phase.PREPARED, torch.get_rng_state()
        gathered = [torch.empty_like(self._own) for _ in range(self.architecture.world.size)]
        dist.all_gather(gathered, self._own)
        self._generators = gathered

    def report(self) -> Report:
        return replace(super().report(), phase=self._phase.value)

    @classmethod
    def plan(cls, architecture: type[Architecture], members: Sequence[int], reports: Sequence[Report]) -> Plan:
        decision = decide([_rank_report(rank, reports) for rank in range(len(reports))], allowed=_ALLOWED)
        if decision.action is Action.RESTART:
            return from_the_beginning(decision.reason)
        ahead = min(report.member for report in reports if report.step == decision.frontier)
        # Whoever is behind rolls forward before it is asked for anything
        found = super().plan(architecture, members, [replace(report, step=decision.frontier) for report in reports])
        return replace(found, witness=ahead)

    def restore(self, plan: Plan) -> None:
        if self._before is not None and self._before.state().step < plan.step:
            self._roll_forward(self._before)
        super().restore(plan)
        if plan.step:
            self._share_generators(plan)

    def _roll_forward(self, before: Architecture) -> None:
        """Apply the complete gradients that this rank holds, for its peers have stepped."""
        torch.set_rng_state(self._own)
        before.roll_forward()
        self._held = before.state()

    def _share_generators(self, plan: Plan) -> None:
        """Whoever has passed the last vote knows what the generators of lost ranks were."""
        world = self.architecture.world
        rows = torch.empty(world.size, len(torch.get_rng_state()), dtype=torch.uint8)
        if self.member == plan.witness:
            rows = torch.stack(self._generators)
        dist.broadcast(rows, world.members.index(plan.witness))
        self._generators = [row.clone() for row in rows]
        if self._before is None:
            torch.set_rng_state(self._generators[world.rank])
            self.architecture.commit(plan.step)


def _rank_report(rank: int, reports: Sequence[Report]) -> RankReport:
    """A report in AccelPact's terms.

    While nobody has stepped yet, gradients count as incomplete: a lost rank's random generator is known only if the
    vote on them has passed.
    """
    report = reports[rank]
    uneven = len({one.step for one in reports}) > 1
    phase = Phase(report.phase) if uneven else Phase.BACKWARD
    return RankReport(rank=rank, generation=0, frontier=report.step, phase=phase)

"""FT4: a snapshot in the memory of a peer, upon a warning."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.failbench.mechanisms.replication import Replication


class JustInTime(Replication):
    """Nothing is saved before a warning, and a fault without one costs everything (section II-B)."""

    needs_warning = True

    def hold(self, victims: Sequence[int]) -> None:
        """Listen to a victim, which says nothing more: so its end is noticed as in any exchange."""
        world = self.architecture.world
        living = [rank for rank, member in enumerate(world.members) if member not in victims]
        silent = living[0] if self.member in victims else world.members.index(victims[0])
        dist.recv(torch.empty(1), silent)

    def protect(self) -> None:
        """Nothing: the next warning will come."""

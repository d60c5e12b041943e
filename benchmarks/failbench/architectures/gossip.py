"""A6: gossip, that is decentralized SGD."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.failbench.architectures.architecture import Architecture

_ROUNDS = 3


class Gossip(Architecture):
    """Each rank averages its parameters with one neighbour, another one in each of three rounds, and then steps alone.

    Each pair has a link of its own, so that a lost rank takes down its own edges only.
    """

    degrades = True
    independent = True
    skew = 10  # ranks of a turn in common are three steps apart at the most, and three such stretches join any two

    @classmethod
    def shard(cls, rank: int, members: Sequence[int]) -> str:
        return f"model of rank {members[rank]}"

    def build(self) -> None:
        self.model = self.task.model()
        rank, size = self.world.rank, self.world.size
        self._partners = [partner(rank, turn, size) for turn in range(_ROUNDS)]
        # By turns, so that both ends of an edge ask for it at the same time
        self._edges = {one: self.world.link(one) for one in dict.fromkeys(self._partners) if one is not None}

    def step(self) -> float:
        self._average(self._partners[self._committed % _ROUNDS])
        inputs, targets = self.take()
        self.model.zero_grad()
        loss = self.task.loss(self.model(inputs), targets) / len(inputs)
        loss.backward()
        self.update()
        return loss.item()

    def _average(self, neighbour: int | None) -> None:
        if neighbour is None or neighbour not in self._edges:
            return
        own = self.flat_parameters()
        theirs = torch.empty_like(own)
        try:
            self._edges[neighbour].swap(own, theirs)
        except RuntimeError:
            if self.on_loss is None:
                raise
            del self._edges[neighbour]
            self.on_loss(neighbour)
            return
        self.set_parameters((own + theirs) / 2)


def partner(rank: int, turn: int, size: int) -> int | None:
    """The neighbour of a turn in a round-robin tournament: all pairs of a turn are disjoint, and none comes twice.

    Args:
        rank: Whose.
        turn: From 0.
        size: Ranks; of an odd number one has no partner in each turn.
    """
    places = size + size % 2
    last, turns = places - 1, places - 1
    if rank == last:
        found = next(one for one in range(turns) if 2 * one % turns == turn % turns)
    else:
        found = (turn - rank) % turns
        found = last if found == rank else found
    return found if found < size else None

"""Replicas of a shard compare what they hold: a silent divergence is found, and named."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_accelpact.recovery.machine import RepairMachine
from lightning_accelpact.recovery.operation import Operations
from lightning_accelpact.recovery.options import HsdpShape

log = logging.getLogger("accelpact")

_NAMED = 5  # in a message
Digests = dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A parameter, or a value of optimizer state, of which replicas hold different bits.

    Args:
        update: Updates that had been applied when it was found.
        name: As :func:`~.digest.shard_digests` gives it.
        ranks: Those that differ from the majority; without a majority, as of two replicas always, all that hold it.
        certain: Whether there is a majority.
    """

    update: int
    name: str
    ranks: tuple[int, ...]
    certain: bool

    def __str__(self) -> str:
        kind, _, name = self.name.partition("/")
        what = f"{kind} {name}"
        if self.certain:
            return f"{what} on rank {_listed(self.ranks)} differs from the other replicas"
        return f"{what} differs between ranks {_listed(self.ranks)}, and no majority tells which of them is wrong"


def _listed(ranks: Sequence[int]) -> str:
    return " and ".join([", ".join(map(str, ranks[:-1])), str(ranks[-1])]) if len(ranks) > 1 else str(ranks[0])


def replicas(shape: HsdpShape) -> list[list[int]]:
    """For each shard the ranks that hold it."""
    return [list(range(shard, shape.replicate * shape.shard, shape.shard)) for shard in range(shape.shard)]


def compare(update: int, digests: Sequence[Digests], groups: Sequence[Sequence[int]]) -> list[Divergence]:
    """Everything in which replicas differ.

    Args:
        update: Updates that have been applied.
        digests: Of each rank, in rank order.
        groups: For each shard the ranks that hold it.
    """
    found = []
    for ranks in groups:
        for name in sorted(set().union(*(digests[rank] for rank in ranks))):
            held = {rank: digests[rank].get(name) for rank in ranks}
            most_common, votes = Counter(held.values()).most_common(1)[0]
            if votes == len(ranks):
                continue
            certain = 2 * votes > len(ranks)
            named = tuple(rank for rank in ranks if not certain or held[rank] != most_common)
            found.append(Divergence(update=update, name=name, ranks=named, certain=certain))
    return found


class ReplicaGuard:
    """Lets the replicas compare their shards every so many updates, over the control plane.

    Not by a collective of training: what it compares may have been spoilt on that way, and a digest is small. First one
    digest of everything goes round; only if it differs somewhere those of the single parameters follow.

    Args:
        every: After how many updates; 0 for never.
        on_divergence: ``warn``, or ``stop`` the run on every rank.
        machine: Tells the committed frontier, and fail-stops.
        operations: Runs the exchange to its end whatever faults come.
        groups: For each shard the ranks that hold it.
        digests: Of this rank's shards.
    """

    def __init__(
        self,
        *,
        every: int,
        on_divergence: Literal["warn", "stop"],
        machine: RepairMachine,
        operations: Operations,
        groups: Sequence[Sequence[int]],
        digests: Callable[[], Digests],
    ) -> None:
        self._every = every
        self._stops = on_divergence == "stop"
        self._machine = machine
        self._operations = operations
        self._groups = groups
        self._digests = digests
        self._checked = self._agreed = 0
        self.divergences: list[Divergence] = []

    def check(self) -> None:
        """Between two updates, on every rank: compare, if it is time to and has not been done.

        Raises:
            FailStop: if replicas differ and the run is to stop.
        """
        update = self._machine.progress.frontier
        if not self._every or update == self._checked or update % self._every:
            return
        self._checked = update
        own = self._digests()
        totals = self._operations.gather_json(hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest())
        if all(len({totals[rank] for rank in ranks}) == 1 for ranks in self._groups):
            self._agreed = update
        else:
            self._report(compare(update, self._operations.gather_json(own), self._groups))

    def _report(self, found: list[Divergence]) -> None:
        known = {(one.name, one.ranks) for one in self.divergences}
        new = [one for one in found if (one.name, one.ranks) not in known]
        self.divergences += new
        if self._stops:
            self._machine.stop.everywhere(self._message(found))
        elif new:
            log.warning(self._message(new))

    def _message(self, found: list[Divergence]) -> str:
        rest = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        return (
            f"after update {found[0].update} replicas hold different bits: {'; '.join(map(str, found[:_NAMED]))}{rest}."
            f" They last agreed after update {self._agreed}: a checkpoint written later may hold the error"
        )

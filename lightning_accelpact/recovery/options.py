"""The options of the strategy and the plugin, checked before any process group is made."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from lightning_accelpact.recovery.action import Action

# What a fault inside an update may be answered with, and the actions which that leaves out
_UNCOMMITTED = {"retry": (), "redo": (Action.RETRY,), "restart": (Action.RETRY, Action.REDO)}


_POLICIES = ("warn", "stop")

ORDER = (
    ("rebuild_timeout", "collective_timeout", "a rebuild would outlast the collectives"),
    ("heartbeat_deadline", "collective_timeout", "repairs would wait for a rank before it counts as lost"),
    ("collective_timeout", "repair_budget", "healthy ranks would be given up too early"),
)
"""Which duration must be shorter than which, and what would happen otherwise."""


@dataclass(frozen=True, kw_only=True)
class RecoveryOptions:
    """What may be repaired, and how long it may take.

    Args:
        repair_budget: Seconds from a fault in which a repair may be begun again; then the run fail-stops. Longer
            than ``collective_timeout``: a rank that no notice reaches leaves its collective only then.
        max_repairs_per_update: Repairs begun during one update, or one operation between two, before the run fail-stops.
        collective_timeout: Seconds that a collective or a commit vote may take; longer than the slowest rank's
            longest pause between two collectives.
        rebuild_timeout: Seconds that making one communicator may take in a repair; shorter than
            ``collective_timeout``, since a second fault during the repair may cost this much.
        heartbeat_deadline: Seconds after which a rank counts as lost whose process is stopped, or whose node is not heard.
            Shorter than ``collective_timeout``. A killed process is noticed at once.
        control_interface: Network interface whose address the control plane uses; ``None`` for the launcher's
            rendezvous address.
        uncommitted: The cheapest answer to a fault inside an update: ``retry`` runs the collective that failed again
            in place, or if that cannot be the update as ``redo`` does, from memory; ``restart`` fail-stops as the
            paper does.

        digest_every: After how many updates replicas compare a digest of their shards; 0 for never.
        on_divergence: What to do if they differ: ``warn`` on every rank, or ``stop`` the run.
        envelope: What says which actions are qualified on this stack. ``auto``: the user's file, or what has been
            measured here before, or else a short measurement at the start of this run. A path: that file alone. ``off``:
            nothing does, and everything that the other options allow is done.

    Raises:
        ValueError: names the value, what is allowed and what to do.
    """

    repair_budget: float = 900.0
    max_repairs_per_update: int = 5
    collective_timeout: float = 600.0
    rebuild_timeout: float = 10.0
    heartbeat_deadline: float = 3.0
    control_interface: str | None = None
    uncommitted: Literal["retry", "redo", "restart"] = "retry"
    digest_every: int = 0
    on_divergence: Literal["warn", "stop"] = "stop"
    envelope: Literal["auto", "off"] | str | os.PathLike[str] = "auto"

    def __post_init__(self) -> None:
        for name in ("repair_budget", "collective_timeout", "rebuild_timeout", "heartbeat_deadline"):
            self._require_seconds(name)
        for shorter, longer, otherwise in ORDER:
            self._require_order(shorter, longer, otherwise)
        self._require_count("max_repairs_per_update", at_least=1)
        self._require_count("digest_every", at_least=0)
        if self.uncommitted not in _UNCOMMITTED:
            raise ValueError(f"uncommitted={self.uncommitted!r} must be one of {list(_UNCOMMITTED)}")
        self._require_policy()
        envelope = os.fspath(self.envelope) if isinstance(self.envelope, (str, os.PathLike)) else None
        if not isinstance(envelope, str) or not envelope:
            raise ValueError(f'envelope={self.envelope!r} must be "auto", "off" or the path of an envelope')

    def _require_policy(self) -> None:
        if self.on_divergence == "heal":
            raise ValueError(
                'on_divergence="heal" is not possible yet: no replica can be set right while the run goes on. Choose'
                ' "stop", and resume from a checkpoint written before the divergence, or "warn"'
            )
        if self.on_divergence not in _POLICIES:
            raise ValueError(f"on_divergence={self.on_divergence!r} must be one of {list(_POLICIES)}")

    def _require_count(self, name: str, *, at_least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ValueError(f"{name}={value!r} must be a whole number of at least {at_least}")

    def _require_seconds(self, name: str) -> None:
        value = getattr(self, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value <= 0:
            raise ValueError(f"{name}={value!r} must be a finite number of seconds above 0")

    def _require_order(self, shorter: str, longer: str, otherwise: str) -> None:
        low, high = getattr(self, shorter), getattr(self, longer)
        if low >= high:
            raise ValueError(
                f"{shorter}={low:g} s must be shorter than {longer}={high:g} s, otherwise {otherwise}:"
                f" raise {longer} or lower {shorter}"
            )

    @property
    def allowed(self) -> tuple[Action, ...]:
        """The actions that these options allow."""
        return tuple(action for action in Action if action not in _UNCOMMITTED[self.uncommitted])

    def seconds(self, name: str) -> timedelta:
        """One of the durations as torch wants it."""
        return timedelta(seconds=getattr(self, name))


@dataclass(frozen=True, kw_only=True)
class HsdpShape:
    """How many replicas of how many shards.

    Args:
        replicate: Size of a replication group, across nodes.
        shard: Size of a sharding group, inside a node.
    """

    replicate: int
    shard: int

    @classmethod
    def resolve(
        cls, replicate: int | Literal["auto"], shard: int | Literal["auto"], *, num_nodes: int, devices_per_node: int
    ) -> HsdpShape:
        """Fill in ``"auto"``: nodes × devices per node; on one node 2 × the rest if that divides.

        Raises:
            ValueError: if the sizes do not multiply to the number of processes, or there is only one process.
        """
        world = num_nodes * devices_per_node
        if world < 2:
            raise ValueError(
                "accelpact_hsdp needs at least 2 processes, since recovery needs peers; got 1:"
                " raise Trainer(devices=..., num_nodes=...)"
            )
        for name, size in (("replicate", replicate), ("shard", shard)):
            if size != "auto" and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ValueError(f'{name}={size!r} must be "auto" or a whole number of at least 1')
        replicate, shard = cls._fill(replicate, shard, num_nodes, world)
        if replicate * shard != world:
            fitting = [f"{size} x {world // size}" for size in range(1, world + 1) if world % size == 0]
            raise ValueError(
                f"replicate={replicate} x shard={shard} makes {replicate * shard} processes, but this run has {world}"
                f" ({num_nodes} nodes x {devices_per_node}): choose one of {', '.join(fitting)}"
            )
        return cls(replicate=replicate, shard=shard)

    @staticmethod
    def _fill(replicate: int | str, shard: int | str, num_nodes: int, world: int) -> tuple[int, int]:
        if replicate == "auto" and shard == "auto":
            replicate = num_nodes if num_nodes > 1 else 2 if world % 2 == 0 else 1
        if replicate == "auto":
            return max(1, world // shard), shard
        return replicate, max(1, world // replicate) if shard == "auto" else shard

    @property
    def caveat(self) -> str:
        """What a size of 1 means, to be said aloud; empty for true HSDP."""
        if self.replicate == 1:
            return f"replicate=1: nothing is replicated, this is plain FSDP over {self.shard} processes"
        if self.shard == 1:
            return f"shard=1: nothing is sharded, every one of the {self.replicate} processes holds the whole model"
        return ""

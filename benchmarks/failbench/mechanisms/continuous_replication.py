"""FT5: snapshots in the memory of a peer, after every step."""

from __future__ import annotations

from benchmarks.failbench.mechanisms.replication import Replication


class ContinuousReplication(Replication):
    """Model and optimizer are mirrored whole each step: a stand-in for redundant computation (section II-B)."""

    periodic = True

    @classmethod
    def save_interval(cls, interval: int) -> int:
        return 1

"""FT6: snapshots in the memory of two peers, at an interval."""

from __future__ import annotations

from benchmarks.failbench.mechanisms.replication import Replication


class KReplica(Replication):
    """As FT2 with k = 2, so that any two ranks may be lost (section II-B)."""

    periodic = True
    peers = 2

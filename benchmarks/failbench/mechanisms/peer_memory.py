"""FT2: snapshots in the memory of a peer, at an interval."""

from __future__ import annotations

from benchmarks.failbench.mechanisms.replication import Replication


class PeerMemory(Replication):
    """Every rank takes part at once, so the ring of transfers is on the critical path (section VII-C)."""

    periodic = True

"""FT7: the data of lost ranks is shared out among the survivors."""

from __future__ import annotations

from benchmarks.failbench.mechanisms.survivors import Survivors


class Redistribution(Survivors):
    """Fewer ranks train on the same batches, each on a larger share."""

    respawns = False
    keeps_batch = True

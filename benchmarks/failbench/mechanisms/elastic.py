"""FT8: the groups are formed anew by those that are left."""

from __future__ import annotations

from benchmarks.failbench.mechanisms.survivors import Survivors


class Elastic(Survivors):
    """Fewer ranks train on smaller batches, as by PyTorch Elastic and Horovod Elastic (section II-B)."""

    respawns = False

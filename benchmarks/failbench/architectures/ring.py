"""A2: ring all-reduce."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.failbench.architectures.data_parallel import DataParallel
from benchmarks.failbench.world import swap


class Ring(DataParallel):
    """Each rank talks to its two neighbours: a reduce-scatter and an all-gather go round once each."""

    def sum(self, flat: Tensor) -> Tensor:
        rank, size = self.world.rank, self.world.size
        right, left = (rank + 1) % size, (rank - 1) % size
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
        chunks = list(padded.chunk(size))
        incoming = torch.empty_like(chunks[0])
        for turn in range(size - 1):
            swap(chunks[(rank - turn) % size], incoming, to=right, source=left)
            chunks[(rank - turn - 1) % size] += incoming
        for turn in range(size - 1):
            swap(chunks[(rank + 1 - turn) % size], chunks[(rank - turn) % size], to=right, source=left)
        return padded[: len(flat)]

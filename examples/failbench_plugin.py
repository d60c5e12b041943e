"""An architecture and a mechanism of one's own for FailBench; see docs/failbench.md."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.failbench.architectures.data_parallel import DataParallel
from benchmarks.failbench.mechanisms.periodic_disk import PeriodicDisk
from benchmarks.failbench.world import swap


class Butterfly(DataParallel):
    """All-reduce by recursive doubling: in turn k each rank swaps sums with the one whose k-th bit differs."""

    @classmethod
    def usable(cls, living: int) -> int:
        """The largest power of two."""
        return 1 << (living.bit_length() - 1)

    def sum(self, flat: Tensor) -> Tensor:
        """The sum of all ranks' vectors, bit for bit the same on each."""
        distance, total = 1, flat.clone()
        while distance < self.world.size:
            partner, theirs = self.world.rank ^ distance, torch.empty_like(total)
            swap(total, theirs, to=partner, source=partner)
            total += theirs
            distance *= 2
        return total


class OftenToDisk(PeriodicDisk):
    """Checkpoints on disk, five times as often as asked for."""

    @classmethod
    def save_interval(cls, interval: int) -> int:
        """Steps from one save to the next."""
        return max(1, interval // 5)

"""A3: tree all-reduce."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.failbench.architectures.data_parallel import DataParallel
from benchmarks.failbench.world import post


class Tree(DataParallel):
    """A binary tree with rank 0 as its root: sums go up, the total comes down."""

    def sum(self, flat: Tensor) -> Tensor:
        rank = self.world.rank
        children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < self.world.size]
        incoming = torch.empty_like(flat)
        for child in children:
            dist.recv(incoming, child)
            flat += incoming
        if rank:
            post(flat, (rank - 1) // 2)
            dist.recv(flat, (rank - 1) // 2)
        for child in children:
            post(flat, child)
        return flat

"""A7: data x pipeline x tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.failbench.architectures.pipeline import Pipeline
from benchmarks.failbench.architectures.tensor_parallel import cut
from benchmarks.failbench.workload import CutFeatures

_STAGES, _SLICES = 2, 2
_BLOCK = _STAGES * _SLICES  # ranks that hold a whole model


class Hybrid(Pipeline):
    """Replicas of two stages of two slices each. The rank is (replica, stage, slice), the last one varying fastest."""

    workload = CutFeatures

    @classmethod
    def usable(cls, living: int) -> int:
        return living - living % _BLOCK

    @classmethod
    def contributors(cls, size: int) -> int:
        return size // _BLOCK

    @classmethod
    def share_of(cls, rank: int) -> int:
        return rank // _BLOCK

    @classmethod
    def shard(cls, rank: int, members: Sequence[int]) -> str:
        return f"stage {rank // _SLICES % _STAGES}, slice {rank % _SLICES}"

    def build(self) -> None:
        shape = (self.world.size // _BLOCK, _STAGES, _SLICES)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "pipeline", "tensor"))
        self._replicas = mesh.get_group("data")
        self.make_stage(mesh.get_local_rank("pipeline"), _STAGES, mesh.get_group("pipeline"))
        for block in self.model.values():
            cut(block, mesh["tensor"])

    def step(self) -> float:
        flat = self.flat_gradients(self.passes())
        dist.all_reduce(flat, group=self._replicas)
        return self.apply(flat)

"""A5: tensor parallel."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from benchmarks.failbench.architectures.architecture import Architecture
from benchmarks.failbench.workload import CutFeatures


class TensorParallel(Architecture):
    """Each block of the MLP stack is cut along its inner features, as in Megatron-LM; its outputs are summed up."""

    workload = CutFeatures

    @classmethod
    def usable(cls, living: int) -> int:
        """The largest power of two, which divides the inner features."""
        return 1 << (living.bit_length() - 1)

    @classmethod
    def contributors(cls, size: int) -> int:
        return 1

    @classmethod
    def share_of(cls, rank: int) -> int:
        return 0

    @classmethod
    def shard(cls, rank: int, members: Sequence[int]) -> str:
        return f"slice {rank} of {len(members)}"

    def build(self) -> None:
        mesh = init_device_mesh("cpu", (self.world.size,), mesh_dim_names=("tensor",))
        self.model = self.task.model()
        for block in self.model:
            cut(block, mesh)

    def step(self) -> float:
        loss = self.backward()
        self.update()
        return loss


def cut(block: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a block along its inner features, each rank out of its own copy of the whole."""
    parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}, src_data_rank=None)

"""What the architectures with a whole model on each rank have in common: only their sum of gradients differs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor

from benchmarks.failbench.architectures.architecture import Architecture


class DataParallel(Architecture):
    """All ranks hold the same model and train on shares of the batch; :meth:`sum` is the architecture."""

    @classmethod
    def shard(cls, rank: int, members: Sequence[int]) -> str:
        return "model"

    def build(self) -> None:
        self.model = self.task.model()

    def step(self) -> float:
        return self.apply(self.sum(self.flat_gradients(self.backward())))

    @abstractmethod
    def sum(self, flat: Tensor) -> Tensor:
        """The sum of all ranks' vectors, bit for bit the same on each."""

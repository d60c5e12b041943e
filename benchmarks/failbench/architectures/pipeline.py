"""A4: pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from benchmarks.failbench.architectures.architecture import Architecture
from benchmarks.failbench.workload import Features


class Pipeline(Architecture):
    """Consecutive blocks of the MLP stack on each rank; micro-batches go through one after the other (GPipe)."""

    workload = Features

    @classmethod
    def contributors(cls, size: int) -> int:
        return 1

    @classmethod
    def share_of(cls, rank: int) -> int:
        return 0

    @classmethod
    def shard(cls, rank: int, members: Sequence[int]) -> str:
        return f"stage {rank} of {len(members)}"

    def build(self) -> None:
        self.make_stage(self.world.rank, self.world.size, None)

    def make_stage(self, stage: int, stages: int, group: dist.ProcessGroup | None) -> None:
        """Make this rank's stage of the model, and the schedule."""
        blocks = list(self.task.model())
        chosen = range(len(blocks) * stage // stages, len(blocks) * (stage + 1) // stages)
        self.model = nn.ModuleDict({str(index): blocks[index] for index in chosen})
        self.stage, self.stages, self.group = stage, stages, group
        shape = (self.task.batch // self.preset.micro_batches, self.preset.width)
        part = PipelineStage(
            nn.Sequential(*self.model.values()),
            stage,
            stages,
            torch.device("cpu"),
            input_args=torch.empty(shape, requires_grad=stage > 0),
            output_args=torch.empty(shape, requires_grad=True),
            group=group,
        )
        # The gradients of micro-batches are added up: the loss is divided by the whole batch already
        self._schedule = ScheduleGPipe(part, self.preset.micro_batches, loss_fn=self._loss, scale_grads=False)

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.stage == self.stages - 1

    def step(self) -> float:
        loss = self.passes()
        self.update()
        return loss

    def passes(self) -> float:
        """All micro-batches forward and backward.

        Returns:
            The loss, on the first and the last stage.
        """
        inputs, targets = self.take()
        self.model.zero_grad()
        losses: list[Tensor] = []
        self._schedule.step(
            *([inputs] if not self.stage else []), **({"target": targets, "losses": losses} if self.is_last else {})
        )
        return self._told(torch.stack(losses).sum().detach() if losses else torch.zeros(()))

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(outputs, targets) / self.batch

    def _told(self, loss: Tensor) -> float:
        """The first stage keeps account, but the last one knows the loss."""
        if self.stages > 1 and self.is_last:
            dist.send(loss, group=self.group, group_dst=0)
        elif self.stages > 1 and not self.stage:
            dist.recv(loss, group=self.group, group_src=self.stages - 1)
        return loss.item()

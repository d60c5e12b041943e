"""The base of all architectures: what a rank holds, and one step of training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.failbench.preset import Preset
from benchmarks.failbench.state import State
from benchmarks.failbench.workload import Images, Workload
from benchmarks.failbench.world import World

_MOMENTUM = 0.9


class Architecture(ABC):
    """One rank's part of the training, made anew for each formation.

    A subclass names its workload and says in :meth:`build` and :meth:`step` what is particular to it. Errors of
    communication leave :meth:`step`: the runner takes them for the loss of a rank.

    Args:
        world: The ranks there are now; its default group is up.
        preset: Sizes.
        seed: Of weights, samples and random generators.
        batch: Samples of all ranks together in a step; None for the preset's for each share.
        on_loss: To be told the rank of a lost peer, if training goes on without it; None if it must not.
    """

    workload: ClassVar[type[Workload]] = Images
    degrades: ClassVar[bool] = False
    """Whether it goes on by itself, without its lost ranks."""
    independent: ClassVar[bool] = False
    """Whether the states of two ranks may come from different steps."""
    skew: ClassVar[int] = 1
    """How many steps after a warned rank's current one all ranks can save at the same step: none has come further."""
    derived: ClassVar[frozenset[str]] = frozenset()
    """Shards that :meth:`synchronize` makes from others, so that nobody needs to hold them."""

    def __init__(
        self,
        world: World,
        preset: Preset,
        seed: int,
        *,
        batch: int | None = None,
        on_loss: Callable[[int], None] | None = None,
    ) -> None:
        self.world = world
        self.preset = preset
        self.task = self.workload(preset, seed)
        self.samples = self.task.samples
        self.shares = self.contributors(world.size)
        self.share = self.share_of(world.rank)
        self.batch = batch or self.task.batch * self.shares
        self.on_loss = on_loss
        self.vote: Callable[[], None] | None = None
        self.model: nn.Module = nn.Identity()
        self.build()
        # On the parts that this rank holds: DTensors would cost more than the step itself
        self._held = {name: nn.Parameter(_local(one)) for name, one in self.model.named_parameters()}
        self._optimizer = torch.optim.SGD(
            self._held.values(), lr=preset.learning_rate, momentum=_MOMENTUM, foreach=False
        )
        for parameter in self._held.values():
            self._optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        torch.manual_seed(1000 * (seed + 1) + self.share)
        self._committed = 0
        self.commit(0)

    @classmethod
    def usable(cls, living: int) -> int:
        """How many of so many ranks can train together."""
        return living

    @classmethod
    def contributors(cls, size: int) -> int:
        """Into how many shares so many ranks divide a batch."""
        return size

    @classmethod
    def share_of(cls, rank: int) -> int:
        """Which share a rank sees."""
        return rank

    @classmethod
    @abstractmethod
    def shard(cls, rank: int, members: Sequence[int]) -> str:
        """Which part of the training state a rank holds; ranks with the same are replicas."""

    @abstractmethod
    def build(self) -> None:
        """Make this rank's part of the model, and groups."""

    @abstractmethod
    def step(self) -> float:
        """Train on one batch; with all ranks.

        The step is :meth:`update`: an error of communication must find it done, or not begun.

        Returns:
            The loss as rank 0 knows it, a mean over samples.
        """

    def synchronize(self) -> None:
        """After a restore, with all ranks: make what is :attr:`derived`."""

    def finish(self) -> None:
        """After the last step: serve those that are not so far."""

    def commit(self, step: int) -> None:
        """Note that so many steps are done: what a restore would go back to in this rank's memory."""
        self._committed = step
        self._position = self.samples.position
        self._generator = torch.get_rng_state()

    def state(self) -> State:
        """This rank's state at the last commit; its tensors are those of the model, not copies."""
        return State(self._committed, self._position, self._generator, dict(self._tensors()))

    def load(self, state: State) -> None:
        """Take over a state of the same shapes."""
        with torch.no_grad():
            for name, tensor in self._tensors().items():
                tensor.copy_(state.tensors[name])
        self.go_to(state)

    def go_to(self, state: State) -> None:
        """Take over all but its tensors."""
        self.samples.position = state.position
        torch.set_rng_state(state.generator)
        self.commit(state.step)

    def _tensors(self) -> dict[str, Tensor]:
        momenta = {name: self._optimizer.state[one]["momentum_buffer"] for name, one in self._held.items()}
        return {f"model/{name}": one.detach() for name, one in self._held.items()} | {
            f"momentum/{name}": one for name, one in momenta.items()
        }

    def take(self) -> tuple[Tensor, Tensor]:
        """This rank's share of the next batch."""
        return self.samples.take(self.batch, self.share, self.shares)

    def backward(self) -> float:
        """Forward and backward pass of this rank's share, of a model that is whole.

        Returns:
            Its part of the loss: the shares' add up to the mean over the batch.
        """
        inputs, targets = self.take()
        self.model.zero_grad()
        loss = self.task.loss(self.model(inputs), targets) / self.batch
        loss.backward()
        return loss.item()

    def prepared(self) -> None:
        """This rank has its part in the gradients of all: let a mechanism hold it until all have."""
        if self.vote is not None:
            self.vote()

    def update(self) -> None:
        """Step with the gradients there are, which are complete."""
        self.prepared()
        self.roll_forward()

    def roll_forward(self) -> None:
        """The optimizer's part of a step, and its commit."""
        self.optimize()
        self.commit(self._committed + 1)

    def optimize(self) -> None:
        """Apply the gradients."""
        for parameter, trained in zip(self._held.values(), self.model.parameters(), strict=True):
            parameter.grad = _local(trained.grad)
        self._optimizer.step()

    def flat_gradients(self, loss: float) -> Tensor:
        """All gradients in one vector, and the loss at its end."""
        return torch.cat([*(_local(one.grad).flatten() for one in self.model.parameters()), torch.tensor([loss])])

    def apply(self, flat: Tensor) -> float:
        """Step with the gradients of such a vector.

        Returns:
            The loss at its end.
        """
        for parameter, gradient in zip(self.model.parameters(), flat[:-1].split(self._sizes()), strict=True):
            target = _local(parameter.grad)
            target.copy_(gradient.view_as(target))
        self.update()
        return flat[-1].item()

    def flat_parameters(self) -> Tensor:
        """A copy of all parameters in one vector."""
        return torch.cat([one.detach().flatten() for one in self._held.values()])

    def set_parameters(self, flat: Tensor) -> None:
        """Take parameters from such a vector."""
        with torch.no_grad():
            for parameter, values in zip(self._held.values(), flat.split(self._sizes()), strict=True):
                parameter.copy_(values.view_as(parameter))

    def _sizes(self) -> list[int]:
        return [one.numel() for one in self._held.values()]


def _local(tensor: Tensor | None) -> Tensor:
    """The part of a tensor that this rank holds, sharing its memory."""
    assert tensor is not None, "a parameter without a gradient takes no part in training"
    found = tensor.detach()
    return found.to_local() if isinstance(found, DTensor) else found

"""What is trained on: a shuffled set of samples, and how they are dealt out."""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch
from torch import Tensor, nn

from benchmarks.failbench.models import CLASSES, ResNet, stack
from benchmarks.failbench.preset import Preset

_SAMPLES = 512
_NOISE = 0.05


class Samples:
    """A fixed set of samples in an order that changes from epoch to epoch; a position in it can be saved and restored.

    Args:
        inputs: Of all samples, shape (N, ...).
        targets: Likewise.
        seed: Of the order.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, *, seed: int) -> None:
        self.inputs = inputs
        self.targets = targets
        self.seed = seed
        self.position = 0
        self._order = lru_cache(maxsize=2)(self._shuffled)

    def take(self, total: int, share: int, shares: int) -> tuple[Tensor, Tensor]:
        """Move on by a batch of all ranks, and return a share of it: augmented inputs, and targets.

        Args:
            total: Samples of all ranks together.
            share: Which part.
            shares: How many parts there are; they differ by one sample at the most.
        """
        chosen = range(self.position + total * share // shares, self.position + total * (share + 1) // shares)
        self.position += total
        size = len(self.inputs)
        indices = torch.stack([self._order(index // size)[index % size] for index in chosen])
        inputs = self.inputs[indices]
        # The augmentation makes the random generator a part of the state that has to be restored
        return inputs + _NOISE * torch.randn_like(inputs), self.targets[indices]

    def _shuffled(self, epoch: int) -> Tensor:
        return torch.randperm(len(self.inputs), generator=torch.Generator().manual_seed(self.seed + epoch))


class Workload:
    """A model and its samples, the same on every rank.

    Args:
        preset: Sizes.
        seed: Of weights and samples.
    """

    def __init__(self, preset: Preset, seed: int) -> None:
        self.preset = preset
        self.seed = seed

    @property
    def batch(self) -> int:
        """Samples for each share of the data and step."""
        return self.preset.batch

    def model(self) -> nn.Module:
        """The whole model with its first weights."""
        torch.manual_seed(self.seed)
        return self._model()

    @cached_property
    def samples(self) -> Samples:
        """All samples, at their beginning."""
        draw = torch.Generator().manual_seed(self.seed)
        return Samples(*self._samples(draw), seed=self.seed)

    def _model(self) -> nn.Module:
        raise NotImplementedError

    def _samples(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Summed over samples."""
        raise NotImplementedError


class Images(Workload):
    """The ResNet, on images that are their class's image in noise."""

    def _model(self) -> nn.Module:
        return ResNet(self.preset.image, self.preset.channels, self.preset.blocks)

    def _samples(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        side = self.preset.image
        classes = torch.randint(CLASSES, (_SAMPLES,), generator=draw)
        images = torch.randn(CLASSES, 3, side, side, generator=draw)[classes]
        return images + torch.randn(images.shape, generator=draw), classes

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum")


class Features(Workload):
    """The MLP stack, on random vectors whose target is a smooth function of them."""

    @property
    def batch(self) -> int:
        return self.preset.features_batch

    def _model(self) -> nn.Module:
        return stack(self._layers, self.preset.width)

    @property
    def _layers(self) -> int:
        return self.preset.layers

    def _samples(self, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        width = self.preset.width
        vectors = torch.randn(_SAMPLES, width, generator=draw)
        weights = torch.randn(width, width, generator=draw) / width**0.5
        return vectors, torch.tanh(vectors @ weights)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean(1).sum()


class CutFeatures(Features):
    """The same with the stack that is cut along its inner features."""

    @property
    def _layers(self) -> int:
        return self.preset.tensor_layers

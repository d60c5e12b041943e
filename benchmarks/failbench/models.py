"""The two models of the paper (section V-C): a ResNet, and a Megatron-style stack of MLPs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

CLASSES = 10
_EXPANSION = 4
_LARGE = 64  # pixels


class Bottleneck(nn.Module):
    """ResNet's block with three convolutions.

    Norms are over groups of channels: what batch norms keep of their batches would differ from replica to replica.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        inner = outputs // _EXPANSION
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False), _norm(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), _norm(inner), nn.ReLU(),
            nn.Conv2d(inner, outputs, 1, bias=False), _norm(outputs),
        )  # fmt: skip
        same = inputs == outputs and stride == 1
        self.skip = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def _norm(channels: int) -> nn.Module:
    return nn.GroupNorm(min(4, channels), channels)


class ResNet(nn.Sequential):
    """A ResNet; channels (256, 512, 1024, 2048) with blocks (3, 4, 6, 3) are ResNet-50's.

    Its first layers make images of 64 pixels and more a quarter as wide and high, as ResNet-50's do.

    Args:
        image: Height and width of the images.
        channels: Of each stage.
        blocks: Of each stage.
    """

    def __init__(self, image: int, channels: Sequence[int], blocks: Sequence[int]) -> None:
        stem, large = channels[0] // _EXPANSION, image >= _LARGE
        first = nn.Conv2d(3, stem, 7, 2, 3, bias=False) if large else nn.Conv2d(3, stem, 3, 1, 1, bias=False)
        layers: list[nn.Module] = [first, _norm(stem), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2, 1)] if large else []
        inputs = stem
        for stage, (outputs, count) in enumerate(zip(channels, blocks, strict=True)):
            for block in range(count):
                layers.append(Bottleneck(inputs, outputs, 2 if stage and not block else 1))
                inputs = outputs
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Feedforward(nn.Module):
    """Expansion, nonlinearity, contraction: the feed-forward half of a Transformer block, with its residual.

    Args:
        width: Features outside; inside four times as many.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, _EXPANSION * width)
        self.down = nn.Linear(_EXPANSION * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def stack(layers: int, width: int) -> nn.Sequential:
    """The whole MLP stack."""
    return nn.Sequential(*(Feedforward(width) for _ in range(layers)))

"""The state of a rank: what has to be restored for its training to go on as if nothing had happened."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_HEADER = 2  # numbers in front: step, position


@dataclass(frozen=True)
class State:
    """Model, optimizer, random generator and data position of a rank.

    Args:
        step: Steps that have been committed.
        position: Samples that all ranks together have taken.
        generator: State of the random generator, bytes.
        tensors: Parameters (``model/...``) and momenta (``momentum/...``), this rank's shards of them.
    """

    step: int
    position: int
    generator: Tensor
    tensors: Mapping[str, Tensor]

    def clone(self) -> State:
        """A copy that does not change with the model."""
        copies = {name: tensor.clone() for name, tensor in self.tensors.items()}
        return State(self.step, self.position, self.generator.clone(), copies)

    @property
    def bytes(self) -> int:
        """Its size."""
        return sum(one.numel() * one.element_size() for one in (self.generator, *self.tensors.values())) + 8 * _HEADER

    def pack(self) -> Tensor:
        """All of it in one tensor of bytes, to be sent."""
        header = torch.tensor([self.step, self.position])
        parts = (header, self.generator, *self.tensors.values())
        return torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])

    def unpack(self, packed: Tensor) -> State:
        """The state that was packed, which had the shapes of this one."""
        sizes = [8 * _HEADER, *(one.numel() * one.element_size() for one in (self.generator, *self.tensors.values()))]
        header, generator, *rest = packed.split(sizes)
        step, position = header.clone().view(torch.int64).tolist()
        tensors = {
            name: part.clone().view(like.dtype).view(like.shape)
            for (name, like), part in zip(self.tensors.items(), rest, strict=True)
        }
        return State(step, position, generator.clone(), tensors)

    @property
    def own(self) -> dict[str, Any]:
        """What no replica of its shard has: to be saved by each rank."""
        return {"step": self.step, "position": self.position, "generator": self.generator}

    def weights_sha256(self) -> str:
        """Fingerprint of its parameters."""
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            if name.startswith("model/"):
                digest.update(self.tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

"""Collectives with inputs that will not change, so that they can be run once more for those who have not finished them."""

from __future__ import annotations

from typing import Any

import torch

from lightning_accelpact.recovery.c10d import Collective

_ALIGNMENT = 64


class Kept:
    """A collective with copies of its inputs, to which nobody else can write as long as they are needed.

    Args:
        collective: What was called.
        inputs: The copies.
    """

    __slots__ = ("_collective", "_in_place", "_outputs", "inputs")

    def __init__(self, collective: Collective, inputs: list[torch.Tensor]) -> None:
        self._collective = collective
        self._in_place = collective.in_place
        self._outputs: list[tuple[torch.Size, torch.dtype, torch.device]] = []
        self.inputs = inputs

    def seal(self) -> None:
        """The collective has run: its own tensors may go, and from here on nobody may write to the inputs."""
        collective = self._collective
        if not self._in_place:
            self._outputs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in collective.outputs]
        collective.outputs = collective.inputs = []

    @property
    def sound(self) -> bool:
        """Whether nobody has written to the inputs since it ran last."""
        return True

    def serve(self, group: Any) -> None:
        """Run it once more for those that have not finished it; the result goes nowhere."""
        inputs = self._contents()
        outputs = [torch.empty(size, dtype=dtype, device=device) for size, dtype, device in self._outputs]
        self._collective.finish(group, inputs if self._in_place else outputs, inputs)

    def _contents(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self.inputs] if self._in_place else self.inputs


class Watched(Kept):
    """A collective that keeps its inputs as they are: who writes to them is found out.

    Args:
        collective: What was called.
        inputs: Not made in inference mode, where a tensor does not count its versions.
    """

    __slots__ = ("_versions",)

    def seal(self) -> None:
        super().seal()
        self._look()

    def _look(self) -> None:
        self._versions = [tensor._version for tensor in self.inputs]

    @property
    def sound(self) -> bool:
        return self._versions == [tensor._version for tensor in self.inputs]

    def serve(self, group: Any) -> None:
        super().serve(group)
        self._look()  # running it counts as a write


class Shelf:
    """Memory for the copies of one group, used again and again."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}
        self._parts: dict[int, list[torch.Tensor]] = {}

    def copy(self, tensors: list[torch.Tensor], place: int) -> list[torch.Tensor]:
        """Copies of ``tensors``, valid until the next ones for the same place."""
        parts = self._parts.get(place, [])
        if len(parts) != len(tensors) or not all(map(_alike, parts, tensors)):
            parts = self._parts[place] = self._divide(tensors, place)
        for part, tensor in zip(parts, tensors, strict=True):
            part.copy_(tensor.detach() if tensor.requires_grad else tensor)
        return parts

    def _divide(self, tensors: list[torch.Tensor], place: int) -> list[torch.Tensor]:
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        with torch.inference_mode(False):  # else the copies could not be written to outside of that mode
            buffer = self._buffer(sum(sizes), tensors[0].device, place)
            parts = zip(tensors, buffer.split([*sizes, buffer.numel() - sum(sizes)]), strict=False)
            return [part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape) for tensor, part in parts]

    def _buffer(self, size: int, device: torch.device, place: int) -> torch.Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or buffer.numel() < size or buffer.device != device:
            buffer = self._buffers[place] = torch.empty(size, dtype=torch.uint8, device=device)
        return buffer

    @property
    def nbytes(self) -> int:
        """Bytes that hold copies."""
        return sum(buffer.nbytes for buffer in self._buffers.values())


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device

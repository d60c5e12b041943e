"""Large tensors and arrays in lists, such as a validation's outputs: held by a capture, since copies would add up."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

SMALL_BYTES = 1 << 16  # up to which a copy costs next to nothing
# The version of each at its last capture; None once it has been seen to move: whoever writes to it once does so again
_seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class StateLost(Exception):
    """A step that has to run again has written to what was not copied."""


@dataclass(frozen=True, eq=False)
class Held:
    """A tensor or an array as it was at one moment, without a copy.

    Args:
        value: Itself.
        version: The tensor's version counter; ``None`` for what has none, which counts as unchanging.
    """

    value: Any
    version: int | None

    @classmethod
    def of(cls, value: Any) -> Held | None:
        """Hold what is large, and has not been written to as far as is known; ``None`` for anything else."""
        if isinstance(value, torch.Tensor):
            return cls._of_tensor(value) if value.nbytes > SMALL_BYTES else None
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray) and value.nbytes > SMALL_BYTES:
            return cls(value, None)
        return None

    @classmethod
    def _of_tensor(cls, tensor: torch.Tensor) -> Held | None:
        if tensor.is_inference():
            return cls(tensor, None)
        version = tensor._version
        moved = _seen.get(tensor, version) != version
        _seen[tensor] = None if moved else version
        return None if moved else cls(tensor, version)

    def restore(self) -> Any:
        """The value, if it is what it was.

        Raises:
            StateLost: if somebody has written to it.
        """
        if self.version is not None and self.value._version != self.version:
            shape = tuple(self.value.shape)
            raise StateLost(
                f"the step that a fault has cut short wrote in place to a tensor of shape {shape} in a list, which was"
                " not copied before: keep it as an attribute or a buffer of its own, or put a new tensor in its place"
            )
        return self.value


def as_written(value: Any) -> Any:
    """The same value; it is taken for one that is written to, so that the next capture copies it."""
    if isinstance(value, torch.Tensor) and value.nbytes > SMALL_BYTES and not value.is_inference():
        _seen[value] = None
    return value

"""The window: all that running one update's micro-batches again needs, captured as they go by."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class RngState:
    """The state of every random number generator that a training step draws from.

    Args:
        torch_cpu: torch's CPU generator.
        python: Python's ``random``.
        numpy: NumPy's legacy generator, or ``None`` if NumPy is not loaded.
        device: The current CUDA device's generator, or ``None`` without one.
    """

    torch_cpu: torch.Tensor
    python: tuple[Any, ...]
    numpy: Any
    device: torch.Tensor | None

    @classmethod
    def capture(cls) -> RngState:
        """The generators as they are now."""
        numpy = sys.modules.get("numpy")
        return cls(
            torch_cpu=torch.get_rng_state(),
            python=random.getstate(),
            numpy=numpy.random.get_state() if numpy else None,
            device=torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        )

    def restore(self) -> None:
        """Set the generators back."""
        torch.set_rng_state(self.torch_cpu)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device)


class Participant(Protocol):
    """Something besides gradients and generators that a micro-batch changes and a rewind must set back."""

    def capture(self) -> Any:
        """A copy of its state at the window's start."""

    def restore(self, state: Any) -> None:
        """Set it back to a captured state."""


class Buffers:
    """The modules' buffers, such as BatchNorm's running statistics.

    All are copied at every window: a buffer's version counter does not tell whether it has changed, since BatchNorm's
    kernels write to the running statistics without moving it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._copies: dict[tuple[int, str], torch.Tensor] = {}

    def capture(self) -> list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]:
        """(owner, name, the buffer itself, its copy) for every buffer."""
        return [
            (owner, name, buffer, self._copy((id(owner), name), buffer))
            for owner in self._module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def _copy(self, key: tuple[int, str], buffer: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(key)
        if copy is None or copy.shape != buffer.shape or copy.dtype != buffer.dtype or copy.device != buffer.device:
            copy = self._copies[key] = buffer.detach().clone()
            return copy
        return copy.copy_(buffer.detach())

    def restore(self, state: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]]) -> None:
        """Write the copies back into the buffers that were there, also where a module has put another in place."""
        for owner, name, buffer, copy in state:
            owner._buffers[name] = buffer
            with torch.no_grad():
                buffer.copy_(copy)


@dataclass(frozen=True)
class Contents:
    """What a payload is made of, to tell later whether it still is.

    Args:
        structure: Its nested containers and their keys.
        leaves: What they hold.
        versions: How often each tensor among the leaves had been written to.
    """

    structure: pytree.TreeSpec
    leaves: list[Any]
    versions: list[int]

    @classmethod
    def of(cls, payload: Any) -> Contents:
        """The contents as they are now. An object of a class that is no container counts as one leaf."""
        leaves, structure = pytree.tree_flatten(payload)
        tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return cls(structure, leaves, [tensor._version for tensor in tensors if not tensor.is_inference()])

    def still(self, payload: Any) -> bool:
        """Whether the payload has the same containers, which hold the same objects, none of them written to since."""
        now = Contents.of(payload)
        return (
            self.structure == now.structure
            and all(old is new for old, new in zip(self.leaves, now.leaves, strict=True))
            and self.versions == now.versions
        )


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of the window.

    Args:
        payload: What its training step was called with, by reference.
        rng: The generators right before it ran.
        contents: What the payload was made of then.
    """

    payload: Any
    rng: RngState
    contents: Contents

    @property
    def untouched(self) -> bool:
        """Whether the payload has not been changed since, neither a tensor in place nor an entry of a container."""
        return self.contents.still(self.payload)


class Window:
    """The micro-batches of one update, and where the replay stands in them.

    Args:
        participants: What to capture at the window's start and to set back on a rewind.
    """

    def __init__(self, participants: list[Participant]) -> None:
        self._participants = participants
        self._captured: list[Any] = []
        self._micro_batches: list[MicroBatch] = []
        self.position = 0

    def open(self) -> None:
        """Begin a new update: forget the last one, capture the participants."""
        self._micro_batches = []
        self.position = 0
        self._captured = [participant.capture() for participant in self._participants]

    def add(self, payload: Any) -> None:
        """Take in the micro-batch that is about to run."""
        self._micro_batches.append(MicroBatch(payload, RngState.capture(), Contents.of(payload)))

    def __len__(self) -> int:
        return len(self._micro_batches)

    @property
    def pending(self) -> list[MicroBatch]:
        """The micro-batches that are still to run."""
        return self._micro_batches[self.position :]

    @property
    def obstacle(self) -> str:
        """Why the window cannot be run again; empty if it can."""
        for index, micro_batch in enumerate(self._micro_batches):
            if not micro_batch.untouched:
                return f"the training step changed its batch in place (micro-batch {index})"
        return ""

    def rewind(self) -> None:
        """Set the participants back to the window's start; all micro-batches are to run again."""
        for participant, state in zip(self._participants, self._captured, strict=True):
            participant.restore(state)
        self.position = 0

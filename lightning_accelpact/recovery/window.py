"""The window: all that running one update's micro-batches again needs, captured as they go by."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_accelpact.recovery.contents import Contents, Marks, overwrite
from lightning_accelpact.recovery.modules import walk

WEIGHTS_WRITTEN = "a training step or hook wrote to the model's weights, which inside an update only optimizers may do"


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

    All are copied for every micro-batch: a buffer's version counter does not tell whether it has changed, since BatchNorm's
    kernels write to the running statistics without moving it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def capture(self) -> list[tuple[torch.nn.Module, str, torch.Tensor | None, torch.Tensor | None]]:
        """(owner, name, the buffer itself, its copy) for every buffer; ``None`` for one that is still to be made."""
        with torch.no_grad():
            return [
                (owner, name, buffer, None if buffer is None else buffer.clone())
                for owner in walk(self._module)
                for name, buffer in owner._buffers.items()
            ]

    def restore(self, state: list[tuple[torch.nn.Module, str, torch.Tensor | None, torch.Tensor | None]]) -> None:
        """Write the copies back into the buffers that were there, also where a module has put another in place."""
        for owner, name, buffer, copy in state:
            owner._buffers[name] = buffer
            if buffer is not None:
                overwrite(buffer, copy)


class Parameters:
    """The parameters of modules that are no part of the model, such as those of a teacher beside it.

    Args:
        root: What holds these modules.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root

    def capture(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(the parameter itself, its copy)."""
        return [(parameter, parameter.detach().clone()) for parameter in self._root.parameters()]

    def restore(self, state: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write the copies back."""
        for parameter, copy in state:
            overwrite(parameter, copy)


class Modes:
    """What a step may switch for a while and a fault would leave switched: training mode, and which parameters train.

    Args:
        root: The outermost module.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root

    def capture(self) -> tuple[list[tuple[torch.nn.Module, bool]], list[tuple[torch.Tensor, bool]]]:
        """(module, in training mode) of every module, and (parameter, whether it trains) of every parameter."""
        modules = list(walk(self._root))
        parameters = (parameter for module in modules for parameter in module._parameters.values())
        return (
            [(module, module.training) for module in modules],
            [(parameter, parameter.requires_grad) for parameter in parameters if parameter is not None],
        )

    def restore(self, state: tuple[list[tuple[torch.nn.Module, bool]], list[tuple[torch.Tensor, bool]]]) -> None:
        """Switch everything back."""
        modules, parameters = state
        for module, training in modules:
            module.training = training
        for parameter, trains in parameters:
            parameter.requires_grad_(trains)


@dataclass(frozen=True)
class Snapshot:
    """The generators and a window's participants at one moment.

    Args:
        rng: The generators.
        states: Each participant with its state.
    """

    rng: RngState
    states: list[tuple[Participant, Any]]

    @classmethod
    def take(cls, participants: list[Participant]) -> Snapshot:
        """Everything as it is now."""
        return cls(RngState.capture(), [(participant, participant.capture()) for participant in participants])

    def restore(self) -> None:
        """Set everything back."""
        self.rng.restore()
        for participant, state in self.states:
            participant.restore(state)


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch of the window.

    Args:
        payload: What its training step was called with, by reference.
        contents: What the payload was made of right before it ran.
        start: Everything else then.
    """

    payload: Any
    contents: Contents
    start: Snapshot

    def restore(self) -> None:
        """Set everything back to where it was right before the micro-batch ran."""
        self.contents.restore()
        self.start.restore()


class Window:
    """The micro-batches of one update, and where the replay stands in them.

    Participants are captured for each micro-batch, not only for the first: what hooks or a validation between two
    micro-batches have changed is not run again, so a replay must find it as it was.

    Args:
        participants: What to capture before a micro-batch and to set back when it runs again.
        weights: Marks what nobody but the optimizer may write to; too much to be copied, so a change is an obstacle.
    """

    def __init__(self, participants: list[Participant], weights: Callable[[], Marks] = Marks) -> None:
        self._participants = participants
        self._weights = weights
        self._marks = Marks()
        self._micro_batches: list[MicroBatch] = []
        self._rewound = False
        self.position = 0

    def open(self) -> None:
        """Begin a new update: forget the last one."""
        self._micro_batches = []
        self._rewound = False
        self.position = 0
        self._marks = self._weights()

    def include(self, participant: Participant) -> None:
        """Capture this one, too, from the next micro-batch on."""
        self._participants.append(participant)

    def add(self, payload: Any) -> None:
        """Take in the micro-batch that is about to run."""
        self._micro_batches.append(MicroBatch(payload, Contents.of(payload), self.snapshot()))

    def snapshot(self) -> Snapshot:
        """Generators and participants as they are now."""
        return Snapshot.take(self._participants)

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
            if micro_batch.contents.overwritten:
                return f"the training step wrote to a tensor of its batch in place (micro-batch {index})"
        if self._marks.moved:
            return WEIGHTS_WRITTEN
        return ""

    def begin(self) -> MicroBatch:
        """The next pending micro-batch; if it runs again, with everything as it found it at first."""
        micro_batch = self._micro_batches[self.position]
        if self._rewound:
            micro_batch.restore()
        return micro_batch

    def finish(self) -> None:
        """The micro-batch that began last has run."""
        self.position += 1
        self._rewound = self._rewound and bool(self.pending)

    def rewind(self) -> None:
        """All micro-batches are to run again. Nothing is set back before they do."""
        self.position = 0
        self._rewound = True

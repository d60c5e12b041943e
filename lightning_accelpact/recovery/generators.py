"""Random generators that are objects of their own, such as a ``torch.Generator`` that a module keeps."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class GeneratorState:
    """Where a generator stood at one moment.

    Args:
        generator: The generator itself.
        state: A copy of its state, in its own form.
    """

    generator: Any
    state: Any

    @classmethod
    def of(cls, value: Any) -> GeneratorState | None:
        """The state of torch's, Python's and NumPy's generators; ``None`` for anything else."""
        if isinstance(value, torch.Generator):
            return cls(value, value.get_state())
        if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
            return cls(value, value.getstate())
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.random.Generator):
            return cls(value, value.bit_generator.state)
        if numpy is not None and isinstance(value, numpy.random.RandomState):
            return cls(value, value.get_state())
        return None

    def restore(self) -> Any:
        """Set the generator back, and return it."""
        if isinstance(self.generator, torch.Generator):
            self.generator.set_state(self.state)
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(self.state)
        elif hasattr(self.generator, "bit_generator"):
            self.generator.bit_generator.state = self.state
        else:
            self.generator.set_state(self.state)
        return self.generator

"""What a step changes in plain attributes, set back."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_accelpact.participants import Attributes

GENERATORS: dict[str, tuple[Any, Callable[[Any], float]]] = {
    "torch": (torch.Generator().manual_seed(1), lambda generator: torch.rand(1, generator=generator).item()),
    "python": (random.Random(1), lambda generator: generator.random()),
    "numpy": (np.random.default_rng(1), lambda generator: generator.random()),
    "legacy numpy": (np.random.RandomState(1), lambda generator: generator.rand()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_of_the_users_own_draws_the_same_again(name: str) -> None:
    generator, draw = GENERATORS[name]
    owner = SimpleNamespace(noise=generator, several=[generator])
    attributes = Attributes([owner])
    state = attributes.capture()
    drawn = [draw(generator) for _ in range(3)]
    for _ in range(2):  # a second rewind finds the state whole
        attributes.restore(state)
        assert owner.noise is generator and owner.several[0] is generator
        assert [draw(generator) for _ in range(3)] == drawn


def test_a_generator_without_a_state_is_left_alone() -> None:
    owner = SimpleNamespace(noise=random.SystemRandom())
    attributes = Attributes([owner])
    attributes.restore(attributes.capture())
    assert isinstance(owner.noise, random.SystemRandom)

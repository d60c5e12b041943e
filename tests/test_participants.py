"""What a step changes in plain attributes, set back."""

from __future__ import annotations

import copy
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lightning_accelpact.participants import Attributes, Options
from lightning_accelpact.recovery.held import SMALL_BYTES, StateLost

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


# -- containers and arrays

KEPT: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "counter": (lambda: Counter(a=1, b=2), lambda counter: counter.update("ab")),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda ordered: ordered.move_to_end("a")),
    "nested": (lambda: {"losses": [1.0]}, lambda nested: nested["losses"].append(2.0)),
    "queue": (lambda: deque([1, 2], maxlen=2), lambda queue: queue.append(3)),
    "array": (lambda: np.ones(2), lambda array: array.__iadd__(1)),
    "tensor": (lambda: torch.ones(2), lambda tensor: tensor.add_(1)),
}


@pytest.mark.parametrize("name", KEPT)
def test_what_a_step_has_changed_is_set_back_in_place_as_often_as_it_runs_again(name: str) -> None:
    make, change = KEPT[name]
    value = make()
    owner = SimpleNamespace(value=value)
    attributes = Attributes([owner])
    state = attributes.capture()
    for _ in range(2):
        change(owner.value)
        assert repr(owner.value) != repr(make())
        attributes.restore(state)
        assert owner.value is value
        assert repr(owner.value) == repr(make())


def test_a_tensor_that_a_validation_has_left_is_set_back_in_training() -> None:
    with torch.inference_mode():
        best = torch.zeros(2)
    owner = SimpleNamespace(best=best, rest={"best": best})
    attributes = Attributes([owner])
    state = attributes.capture()
    owner.best = torch.ones(2)
    attributes.restore(state)
    assert owner.best is best
    assert owner.best.tolist() == owner.rest["best"].tolist() == [0, 0]


# -- what is large, in lists


def large() -> torch.Tensor:
    return torch.zeros(SMALL_BYTES)


@pytest.mark.parametrize("make", [large, lambda: large().numpy(), torch.inference_mode()(large)])
def test_outputs_that_a_list_collects_are_not_copied(make: Callable[[], Any]) -> None:
    first = make()
    owner = SimpleNamespace(outputs=[first], of=deque([first]))
    attributes = Attributes([owner])
    state = attributes.capture()
    for _ in range(2):
        owner.outputs.append(make())
        attributes.restore(state)
        assert [id(output) for output in owner.outputs] == [id(first)] == [id(output) for output in owner.of]


def test_what_is_written_to_in_a_list_is_copied_from_the_next_time_on() -> None:
    owner = SimpleNamespace(averages=[large()])
    attributes = Attributes([owner])
    for expected in range(3):
        state = attributes.capture()
        owner.averages[0].add_(1)
        if expected == 0:  # nobody could know
            with pytest.raises(StateLost, match="wrote in place to a tensor"):
                attributes.restore(state)
            continue
        for _ in range(2):
            attributes.restore(state)
            assert owner.averages[0].unique().tolist() == [expected]
            owner.averages[0].add_(1)


def test_small_ones_are_copied_wherever_they_are() -> None:
    owner = SimpleNamespace(averages=[torch.zeros(2)])
    attributes = Attributes([owner])
    state = attributes.capture()
    owner.averages[0].add_(1)
    attributes.restore(state)
    assert owner.averages[0].tolist() == [0, 0]


# -- options of optimizers


def changed_options(optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    optimizer.param_groups[1]["lr"].mul_(0.5)


def test_what_a_hook_has_changed_in_an_optimizers_options_is_set_back() -> None:
    weights, rate = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)], torch.tensor(0.2)
    groups = [{"params": weights[:1], "lr": 0.1}, {"params": weights[1:], "lr": rate}]
    optimizer = torch.optim.AdamW(groups)
    options = Options(lambda: [optimizer])
    before = copy.deepcopy([{**group, "params": []} for group in optimizer.param_groups])
    state = options.capture()
    for _ in range(2):
        changed_options(optimizer)
        options.restore(state)
        assert [{**group, "params": []} for group in optimizer.param_groups] == before
        assert optimizer.param_groups[1]["lr"] is rate
    assert optimizer.param_groups[0]["params"][0] is weights[0]

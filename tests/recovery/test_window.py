"""The window: what it captures comes back bit for bit, and what it cannot bring back it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_accelpact.recovery import window
from lightning_accelpact.recovery.contents import Marks
from lightning_accelpact.recovery.window import WEIGHTS_WRITTEN, Buffers, RngState, Window

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(3).sum().item(),
    "dropout": lambda: nn.functional.dropout(torch.ones(64)).sum().item(),
    "python": random.random,
    "python gauss": lambda: random.gauss(0, 1),  # keeps a second value for the next call
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,  # likewise
}


class Recorder:
    """A participant that counts how often it is captured and keeps what it is restored to."""

    def __init__(self) -> None:
        self.captures = 0
        self.restored: list[int] = []

    def capture(self) -> int:
        self.captures += 1
        return self.captures

    def restore(self, state: int) -> None:
        self.restored.append(state)


# -- generators


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_generator_draws_the_same_again(draw: Callable[[], float]) -> None:
    draw()  # leaves the second value of a pair behind where there is one
    state = RngState.capture()
    first = [draw() for _ in range(3)]
    assert [draw() for _ in range(3)] != first
    state.restore()
    assert [draw() for _ in range(3)] == first


def test_a_state_can_be_restored_more_than_once() -> None:
    state = RngState.capture()
    first = torch.rand(2)
    for _ in range(2):
        state.restore()
        assert torch.equal(torch.rand(2), first)


def test_without_numpy_nothing_is_captured_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(window.sys.modules, "numpy")
    state = RngState.capture()
    assert state.numpy is None
    state.restore()


def test_the_device_generator_is_taken_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    restored = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", restored.append)
    RngState.capture().restore()
    assert [state.item() for state in restored] == [7]


# -- buffers


def test_batch_norm_moves_no_version_counter() -> None:
    """Why every buffer is copied for every micro-batch: torch does not tell which ones have changed."""
    norm = nn.BatchNorm1d(3)
    before, version = norm.running_mean.clone(), norm.running_mean._version
    norm(torch.randn(4, 3))
    assert not torch.equal(norm.running_mean, before)
    assert norm.running_mean._version == version


def changed_by_training(model: nn.Module) -> dict[str, torch.Tensor]:
    model(torch.randn(4, 3))
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_buffers_come_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    buffers = Buffers(model)
    objects = dict(model.named_buffers())
    before = {name: buffer.clone() for name, buffer in objects.items()}
    state = buffers.capture()
    for _ in range(2):  # a second rewind finds the copies whole
        after = changed_by_training(model)
        model.scratch.add_(1)
        assert not all(torch.equal(after[name], before[name]) for name in before)
        buffers.restore(state)
        now = dict(model.named_buffers())
        assert all(torch.equal(now[name], before[name]) for name in before)
        assert all(now[name] is objects[name] for name in before)


def test_a_buffer_that_was_replaced_comes_back_as_the_object_it_was() -> None:
    model = nn.Module()
    model.register_buffer("average", torch.ones(2))
    first = model.average
    buffers = Buffers(model)
    state = buffers.capture()
    model.average = model.average * 0.5  # an exponential average is often written so
    buffers.restore(state)
    assert model.average is first
    assert model.average.tolist() == [1, 1]


def test_a_buffer_that_a_validation_has_replaced_is_set_back_in_training() -> None:
    model = nn.Module()
    with torch.inference_mode():
        model.register_buffer("average", torch.zeros(2))
    buffers = Buffers(model)
    state = buffers.capture()
    model.average = torch.ones(2)
    buffers.restore(state)
    assert model.average.tolist() == [0, 0]


def test_a_later_window_captures_anew() -> None:
    model = nn.BatchNorm1d(3)
    buffers = Buffers(model)
    buffers.capture()
    between = changed_by_training(model)
    state = buffers.capture()
    changed_by_training(model)
    buffers.restore(state)
    assert all(torch.equal(buffer, between[name]) for name, buffer in model.named_buffers())


def test_a_buffer_that_is_still_to_be_made_is_made_again() -> None:
    model = nn.Module()
    model.register_buffer("later", None)
    buffers = Buffers(model)
    state = buffers.capture()
    model.later = torch.ones(2)
    buffers.restore(state)
    assert model.later is None


# -- the window


def test_each_micro_batch_finds_the_participants_as_it_did_at_first() -> None:
    recorders = [Recorder(), Recorder()]
    frame = Window(recorders)
    frame.open()
    for payload in "ab":
        frame.add(payload)
        frame.begin()
        frame.finish()
    assert [(recorder.captures, recorder.restored) for recorder in recorders] == [(2, [])] * 2  # nothing ran again
    frame.rewind()
    assert [recorder.restored for recorder in recorders] == [[]] * 2  # a validation may still be using them
    frame.add("c")
    assert [micro_batch.payload for micro_batch in frame.pending] == ["a", "b", "c"]
    for payload in "abc":
        assert frame.begin().payload == payload
        frame.finish()
    assert [(recorder.captures, recorder.restored) for recorder in recorders] == [(3, [1, 2, 3])] * 2
    frame.add("d")
    frame.begin()
    assert [recorder.restored for recorder in recorders] == [[1, 2, 3]] * 2  # it runs for the first time


def test_a_new_update_forgets_a_rewind() -> None:
    recorder = Recorder()
    frame = Window([recorder])
    frame.open()
    frame.add("a")
    frame.rewind()
    frame.open()
    frame.add("b")
    frame.begin()
    assert recorder.restored == []


def test_generators_are_set_back_only_if_it_runs_again() -> None:
    frame = Window([])
    frame.open()
    frame.add("a")
    first = torch.rand(2)
    frame.begin()
    assert not torch.equal(torch.rand(2), first)
    frame.rewind()
    frame.begin()
    assert torch.equal(torch.rand(2), first)


def test_pending_are_the_micro_batches_from_the_position_on() -> None:
    frame = Window([])
    frame.open()
    for payload in "abc":
        frame.add(payload)
        frame.finish()
    assert (len(frame), frame.pending) == (3, [])
    frame.rewind()
    assert [micro_batch.payload for micro_batch in frame.pending] == ["a", "b", "c"]
    frame.position = 2
    assert [micro_batch.payload for micro_batch in frame.pending] == ["c"]
    frame.open()
    assert (len(frame), frame.position, frame.pending) == (0, 0, [])


def test_each_micro_batch_keeps_the_generators_it_began_with() -> None:
    frame = Window([])
    frame.open()
    drawn = []
    for payload in "ab":
        frame.add(payload)
        drawn.append(torch.rand(2).tolist() + [random.random(), np.random.rand()])
    again = []
    for micro_batch in reversed(frame.pending):  # in any order
        micro_batch.start.restore()
        again.append(torch.rand(2).tolist() + [random.random(), np.random.rand()])
    assert again[::-1] == drawn


def test_micro_batches_are_kept_by_reference() -> None:
    batch = {"x": torch.ones(2)}
    frame = Window([])
    frame.open()
    frame.add(batch)
    assert frame.pending[0].payload is batch


# -- obstacles


def untouched_batch() -> dict[str, Any]:
    return {"x": torch.ones(4), "pair": (torch.zeros(2), [torch.ones(1)]), "name": "text", "number": 3}


HARMLESS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "nothing": lambda batch: None,
    "reading": lambda batch: batch["x"].sum().item(),
    "a new tensor beside it": lambda batch: batch["x"] * 2,
    "writing to a copy": lambda batch: batch["x"].clone().add_(1),
}

CONTAINERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "an entry replaced": lambda batch: batch.update(x=batch["x"] * 2),
    "an entry removed": lambda batch: batch.pop("x"),
    "an entry added": lambda batch: batch.update(mask=torch.ones(4)),
    "a list's member replaced": lambda batch: batch["pair"][1].__setitem__(0, torch.ones(1)),
    "a list made longer": lambda batch: batch["pair"][1].append(torch.ones(1)),
    "a plain value replaced": lambda batch: batch.update(number=4),
}

IN_PLACE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a tensor": lambda batch: batch["x"].add_(1),
    "a tensor deep inside": lambda batch: batch["pair"][1][0].zero_(),
    "a view": lambda batch: batch["x"][1:].mul_(2),
    "an element": lambda batch: batch["x"].__setitem__(0, 5.0),
    "resized": lambda batch: batch["x"].resize_(2),
}


def window_with(*batches: Any) -> Window:
    frame = Window([])
    frame.open()
    for batch in batches:
        frame.add({"batch": batch})
    return frame


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_no_obstacle(change: Callable[[dict[str, Any]], Any]) -> None:
    batch = untouched_batch()
    frame = window_with(batch)
    change(batch)
    assert frame.obstacle == ""


@pytest.mark.parametrize("change", CONTAINERS.values(), ids=CONTAINERS)
def test_containers_of_a_batch_are_filled_again(change: Callable[[dict[str, Any]], Any]) -> None:
    batch = untouched_batch()
    before, inner = dict(batch), batch["pair"][1]
    members = list(inner)
    frame = window_with(batch)
    frame.begin()
    change(batch)
    assert frame.obstacle == ""
    frame.rewind()
    again = frame.begin().payload["batch"]
    assert again is batch
    assert again["pair"][1] is inner
    assert list(map(id, inner)) == list(map(id, members))
    assert {name: id(value) for name, value in again.items()} == {name: id(value) for name, value in before.items()}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_a_batch_changed_in_place_is_an_obstacle(change: Callable[[dict[str, Any]], Any]) -> None:
    batch = untouched_batch()
    frame = window_with(untouched_batch(), batch)
    change(batch)
    assert frame.obstacle == "the training step wrote to a tensor of its batch in place (micro-batch 1)"


def test_a_change_before_the_micro_batch_began_is_none() -> None:
    batch = untouched_batch()
    batch["x"].add_(1)
    assert window_with(batch).obstacle == ""


def test_the_obstacle_goes_with_its_window() -> None:
    batch = untouched_batch()
    frame = window_with(batch)
    batch["x"].add_(1)
    assert frame.obstacle
    frame.open()
    assert frame.obstacle == ""


def test_tensors_made_in_inference_mode_have_no_version_and_are_taken() -> None:
    with torch.inference_mode():
        batch = {"x": torch.ones(2)}
    frame = window_with(batch)
    assert frame.obstacle == ""


def test_weights_that_somebody_writes_to_are_an_obstacle_until_the_next_update() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    frame = Window([], lambda: Marks([weight]))
    frame.open()
    frame.add({"batch": untouched_batch()})
    weight.grad = torch.ones(2)
    assert frame.obstacle == ""
    with torch.no_grad():
        weight.mul_(0.5)
    assert frame.obstacle == WEIGHTS_WRITTEN
    frame.open()
    assert frame.obstacle == ""

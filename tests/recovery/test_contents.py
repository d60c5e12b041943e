from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_accelpact.recovery.contents import Contents, overwrite, refill


class Graph:
    """A batch of its own class, such as graph libraries make."""

    def __init__(self) -> None:
        self.nodes = torch.ones(3)
        self.store = {"edges": [1, 2]}

    def to(self, device: Any) -> Graph:
        return self


class Encoding(UserDict):
    """As tokenizers return."""

    def to(self, device: Any) -> Encoding:
        return self


@dataclass
class Sentences:
    """A batch as a dataclass, which Lightning moves to the device field by field."""

    tokens: torch.Tensor
    lengths: list[int]


@dataclass(slots=True)
class Slotted:
    tokens: torch.Tensor


class Immovable:
    """Something that a batch happens to name, such as its dataset."""

    def __init__(self, entries: list[int]) -> None:
        self.entries = entries


Pair = namedtuple("Pair", "left right")


def changed_graph(graph: Graph) -> None:
    graph.label = 1
    graph.nodes = graph.nodes * 2
    graph.store["edges"].append(3)


def changed_sentences(batch: Sentences) -> None:
    batch.tokens = batch.tokens * 2
    batch.lengths.append(3)


# What a payload is, what changes it, and what of it can be compared
CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "dictionary": (lambda: {"a": 1, "b": [2]}, lambda batch: batch.pop("b"), dict),
    "ordered": (lambda: OrderedDict(a=1, b=2), lambda batch: batch.move_to_end("a"), lambda batch: list(batch.items())),
    "list": (lambda: [1, [2, 3]], lambda batch: batch[1].append(4), copy.deepcopy),
    "set": (lambda: {1, 2}, lambda batch: batch.discard(1), set),
    "queue": (lambda: deque([1, 2], maxlen=2), lambda batch: batch.append(3), lambda batch: (list(batch), batch.maxlen)),
    "inside a tuple": (lambda: Pair([1], [2]), lambda batch: batch.right.clear(), lambda batch: [*map(list, batch)]),
    "array": (lambda: np.arange(3), lambda batch: batch.fill(7), lambda batch: batch.tolist()),
    "array inside": (lambda: [np.arange(3)], lambda batch: batch[0].fill(7), lambda batch: batch[0].tolist()),
    "graph": (Graph, changed_graph, lambda batch: (sorted(vars(batch)), batch.nodes.tolist(), batch.store["edges"][:])),
    "dataclass": (
        lambda: Sentences(torch.ones(2), [1]), changed_sentences, lambda batch: (batch.tokens.tolist(), batch.lengths[:])
    ),
    "encoding": (lambda: Encoding(a=1, b=2), lambda batch: batch.pop("a"), lambda batch: sorted(batch.items())),
}


@pytest.mark.parametrize(("make", "change", "look"), CHANGES.values(), ids=CHANGES)
def test_a_changed_payload_is_set_back(
    make: Callable[[], Any], change: Callable[[Any], Any], look: Callable[[Any], Any]
) -> None:
    payload = make()
    before = look(payload)
    contents = Contents.of(payload)
    for _ in range(2):  # what was filled in must not be what is kept
        change(payload)
        assert look(payload) != before
        contents.restore()
        assert look(payload) == before
    assert not contents.overwritten


def test_a_tensor_is_noticed_wherever_it_is() -> None:
    ones = torch.ones(2)
    for payload in (ones, [ones], {"a": (ones,)}, Graph(), Sentences(ones, []), Slotted(ones)):
        contents = Contents.of(payload)
        assert not contents.overwritten
        contents.versions[0][0].add_(1)
        assert contents.overwritten


def test_a_tensor_that_has_left_its_container_still_counts() -> None:
    batch = {"x": torch.ones(2)}
    contents = Contents.of(batch)
    batch.pop("x").add_(1)
    assert contents.overwritten


def test_what_holds_itself_ends() -> None:
    batch: list[Any] = [1]
    batch.append(batch)
    contents = Contents.of(batch)
    batch.clear()
    contents.restore()
    assert batch[0] == 1
    assert batch[1] is batch


def test_other_objects_are_left_alone() -> None:
    dataset, model = Immovable([1]), torch.nn.Linear(2, 2)
    contents = Contents.of({"dataset": dataset, "model": model})
    dataset.entries.append(2)
    with torch.no_grad():
        model.weight.zero_()
    contents.restore()
    assert dataset.entries == [1, 2]
    assert not contents.overwritten


def test_refilling_keeps_the_content_apart() -> None:
    kept = [1, 2]
    target: list[int] = []
    refill(target, kept)
    target.append(3)
    assert kept == [1, 2]


UNCOUNTED: dict[str, Callable[[torch.Tensor], object]] = {
    "through its data": lambda tensor: tensor.data.mul_(2),
    "other data": lambda tensor: setattr(tensor, "data", tensor.data * 2),
    "data of another shape": lambda tensor: setattr(tensor, "data", tensor.data[:1]),
    "by NumPy": lambda tensor: np.multiply(tensor.numpy(), 2, out=tensor.numpy()),
}


@pytest.mark.parametrize("write", UNCOUNTED.values(), ids=UNCOUNTED)
@pytest.mark.parametrize("shape", [(7,), (2, 3), (8, 9, 10, 11)])
def test_a_write_that_torch_does_not_count_is_noticed(write: Callable[[torch.Tensor], object], shape: tuple) -> None:
    tensor = torch.full(shape, 3.0)
    contents = Contents.of({"a": [tensor]})
    assert not contents.overwritten
    write(tensor)
    assert contents.overwritten


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(1.0), torch.empty(0), torch.tensor([float("nan")]), torch.tensor([True]), torch.eye(2).to_sparse(),
        torch.ones(2, device="meta"), torch.ones(1).expand(4), torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, 3).t(), torch.ones(2, requires_grad=True), torch.ones(2, dtype=torch.bfloat16),
    ],
    ids=range(11),
)  # fmt: skip
def test_a_tensor_that_nobody_has_written_to(tensor: torch.Tensor) -> None:
    assert not Contents.of(tensor).overwritten


@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize("now", [False, True])
def test_a_tensor_is_overwritten_in_whatever_mode_it_was_made(made: bool, now: bool) -> None:
    with torch.inference_mode(made):
        tensor = torch.zeros(2)
    with torch.inference_mode(now):
        assert overwrite(tensor, torch.ones(2)) is tensor
    assert tensor.tolist() == [1, 1]


def test_an_expanded_tensor_is_overwritten() -> None:
    tensor = torch.zeros(2, 1).expand(2, 3)
    overwrite(tensor, torch.tensor([[1.0] * 3, [2.0] * 3]))
    assert tensor.tolist() == [[1] * 3, [2] * 3]


def test_a_sparse_tensor_is_overwritten() -> None:
    tensor = torch.eye(2).to_sparse()
    overwrite(tensor, torch.ones(2, 2).to_sparse())
    assert tensor.to_dense().tolist() == [[1, 1], [1, 1]]


def test_a_parameter_is_overwritten_without_a_gradient() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    overwrite(parameter, torch.ones(2))
    assert parameter.tolist() == [1, 1]
    assert parameter.grad_fn is None

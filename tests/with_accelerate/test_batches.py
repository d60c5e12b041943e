"""What loaders have handed out in an update is handed out again, and what cannot be is known."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from accelerate_plugin.batches import Batches, Feed
from lightning_accelpact.recovery.window import Snapshot


class Loader:
    """A prepared loader: says when its batch is the last one."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.end_of_dataloader = False
        self.taken = 0

    def __iter__(self) -> Any:
        for index, batch in enumerate(self.batches):
            self.taken += 1
            self.end_of_dataloader = index == len(self.batches) - 1
            yield batch


class Loop:
    """Feeds of one :class:`Batches`."""

    def __init__(self) -> None:
        self.batches = Batches(lambda: Snapshot.take([]))
        self.idle = False

    def feed(self, loader: Loader, ahead: int = 1) -> Feed:
        return Feed(lambda feed: self.batches.take(feed, idle=self.idle), loader, iter(loader), lambda: ahead)


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_pass_is_that_of_the_loader(loop: Loop) -> None:
    loader = Loader([1, 2, 3])
    seen = []
    for batch in loop.feed(loader):
        loop.batches.begin()
        seen.append((batch, loader.end_of_dataloader))
        loop.batches.forget()
    assert seen == [(1, False), (2, False), (3, True)]


def test_a_rewind_hands_out_again_with_the_generators_as_they_were(loop: Loop) -> None:
    loader = Loader([1, 2, 3])
    feed = loop.feed(loader)
    first = []
    for _ in range(3):
        batch = next(feed)
        loop.batches.begin()
        first.append((batch, loader.end_of_dataloader, random.random(), torch.rand(()).item()))
    loop.batches.rewind()
    again = [(next(feed), loader.end_of_dataloader, random.random(), torch.rand(()).item()) for _ in range(3)]
    assert again == first
    assert loop.batches.obstacle == ""
    with pytest.raises(StopIteration):
        next(feed)


def test_a_batch_has_back_what_the_loop_took_out_of_it(loop: Loop) -> None:
    feed = loop.feed(Loader([{"inputs": 1, "labels": 2}]))
    batch = next(feed)
    loop.batches.begin()
    batch.pop("labels")
    loop.batches.rewind()
    assert next(feed) is batch
    assert batch == {"inputs": 1, "labels": 2}


def test_idle_iterations_take_nothing_new_but_their_first(loop: Loop) -> None:
    loader = Loader([1, 2, 3, 4])
    feed = loop.feed(loader)
    loop.idle = True
    seen = []
    for _ in range(3):
        seen.append(next(feed))
        loop.batches.begin()
    assert (seen, loader.taken) == ([1, 1, 1], 1)
    loop.idle = False
    loop.batches.rewind()
    assert [next(feed), next(feed)] == [1, 2]


def test_two_loaders_in_turn(loop: Loop) -> None:
    one, two = loop.feed(Loader([1, 2, 3])), loop.feed(Loader([10, 20, 30]))
    for _ in range(2):
        next(one), next(two)
        loop.batches.begin()
    loop.batches.rewind()
    assert [next(one), next(two), next(one), next(two), next(one), next(two)] == [1, 10, 2, 20, 3, 30]
    assert loop.batches.obstacle == ""


def test_an_evaluation_in_between_is_no_part_of_the_update(loop: Loop) -> None:
    train = loop.feed(Loader([1, 2, 3]))
    next(train)
    loop.batches.begin()
    assert list(loop.feed(Loader([7, 8]))) == [7, 8]
    for _ in loop.feed(Loader([9, 10])):
        break
    next(train)
    loop.batches.begin()
    assert loop.batches.obstacle == ""
    loop.batches.rewind()
    assert [next(train), next(train)] == [1, 2]


def test_batches_that_other_ranks_are_needed_for_are_taken_ahead(loop: Loop) -> None:
    loader = Loader([1, 2, 3, 4, 5])
    feed = loop.feed(loader, ahead=2)
    taken = []
    last = []
    for _ in feed:
        taken.append(loader.taken)
        last.append(loader.end_of_dataloader)
    assert taken == [2, 2, 4, 4, 5]
    assert last == [False, False, False, False, True]


def test_whether_a_batch_has_come(loop: Loop) -> None:
    feed = loop.feed(Loader([1, 2]))
    assert not loop.batches.fed
    next(feed)
    assert loop.batches.fed
    loop.batches.begin()
    assert not loop.batches.fed
    loop.batches.rewind()
    next(feed)
    assert loop.batches.fed


def _two_passes(loop: Loop) -> Feed:
    feed = loop.feed(Loader([1]))
    list_of_it = [next(feed)]
    loop.batches.begin()
    assert list_of_it == [1]
    assert list(feed) == []
    return feed


def _pass_broken_off(loop: Loop) -> None:
    for _ in loop.feed(Loader([1, 2])):
        loop.batches.begin()
        break


def _several_at_a_time(loop: Loop) -> Feed:
    feed = loop.feed(Loader([1, 2, 3]))
    next(feed), next(feed)
    loop.batches.begin()
    return feed


def _overwritten(loop: Loop) -> Feed:
    feed = loop.feed(Loader([torch.zeros(2)]))
    batch = next(feed)
    loop.batches.begin()
    batch += 1
    return feed


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (_two_passes, "two passes"), (_pass_broken_off, "two passes"), (_several_at_a_time, "several batches"),
        (_overwritten, "in place"),
    ],
)  # fmt: skip
def test_what_cannot_be_handed_out_again_is_known(what: Any, words: str, loop: Loop) -> None:
    kept = what(loop)
    assert words in loop.batches.obstacle
    loop.batches.forget()
    assert loop.batches.obstacle == ""
    del kept

"""The batches that prepared data loaders have handed out in the current update, and hand out again in a replay."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from lightning_accelpact.recovery.contents import Contents, Marks
from lightning_accelpact.recovery.window import WEIGHTS_WRITTEN, MicroBatch, Snapshot


class Feed:
    """One pass over a prepared data loader.

    Args:
        take: Gives the next batch of a feed.
        loader: The prepared data loader.
        iterator: Its own iterator, which gives each batch once.
        ahead: How many batches to take from the iterator at a time: more than 1 where that needs the other ranks, so
            that none of them waits for it in the middle of an update.
    """

    def __init__(
        self, take: Callable[[Feed], Any], loader: Any, iterator: Iterator[Any], ahead: Callable[[], int]
    ) -> None:
        self._take = take
        self._loader = loader
        self._iterator = iterator
        self._ahead = ahead
        self._fetched: list[tuple[Any, bool]] = []
        self._exhausted = False

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> Any:
        return self._take(self)

    def fetch(self) -> tuple[Any, bool]:
        """A batch that was not handed out before, and whether it is the last one.

        Raises:
            StopIteration: if there is none.
        """
        count = 0 if self._fetched or self._exhausted else max(1, self._ahead())
        for _ in range(count):
            try:
                self._fetched.append((next(self._iterator), self._loader.end_of_dataloader))
            except StopIteration:
                self._exhausted = True
                break
        if self._fetched:
            return self._fetched.pop(0)
        return next(self._iterator), self._loader.end_of_dataloader  # its own StopIteration, if it is over

    def say_whether_last(self, last: bool) -> None:
        """Let Accelerate know whether the batch that is handed out now is the last one."""
        self._loader.end_of_dataloader = last


@dataclass
class Handout:
    """One batch, with everything that running on from it again needs.

    Args:
        micro_batch: The batch, what it was made of, and everything else when it was handed out.
        last: Whether it was the last one of its loader.
    """

    micro_batch: MicroBatch
    last: bool


@dataclass
class _Shelf:
    """What one feed has handed out in the current update.

    Args:
        kept: Those that micro-batches have begun with.
        fresh: Those since the last micro-batch; of more than two only two.
        cursor: How many of the kept ones the replay has handed out again.
    """

    kept: list[Handout] = field(default_factory=list)
    fresh: list[Handout] = field(default_factory=list)
    cursor: int = 0


class Batches:
    """The hand-outs of the current update.

    Args:
        snapshot: Captures generators and whatever else a micro-batch changes.
        weights: Marks what nobody but the optimizer may write to.
    """

    def __init__(self, snapshot: Callable[[], Snapshot], weights: Callable[[], Marks] = Marks) -> None:
        self._snapshot = snapshot
        self._weights = weights
        self._marks = Marks()
        self._shelves: weakref.WeakKeyDictionary[Feed, _Shelf] = weakref.WeakKeyDictionary()
        self._kept = 0  # by all shelves, those of feeds that have ended included
        self._again = 0  # handed out again since the last micro-batch
        self._complete = True

    def take(self, feed: Feed, *, idle: bool) -> Any:
        """The next batch of a feed: one of the update's again, while a replay has not come to its end, or a new one.

        Args:
            feed: Whose.
            idle: Whether nothing is computed in the iteration that it is for.
        """
        shelf = self._shelves.setdefault(feed, _Shelf())
        if idle and shelf.kept:
            handout = shelf.kept[-1]
            handout.micro_batch.contents.restore()
            self._again += 1
        elif shelf.cursor < len(shelf.kept):
            handout = shelf.kept[shelf.cursor]
            shelf.cursor += 1
            handout.micro_batch.restore()
            self._again += 1
        else:
            handout = self._new(feed, shelf)
        feed.say_whether_last(handout.last)
        return handout.micro_batch.payload

    def _new(self, feed: Feed, shelf: _Shelf) -> Handout:
        try:
            batch, last = feed.fetch()
        except StopIteration:
            del self._shelves[feed]
            raise
        handout = Handout(MicroBatch(batch, Contents.of(batch), self._snapshot()), last)
        shelf.fresh = [*shelf.fresh[-1:], handout]
        return handout

    def begin(self) -> None:
        """A micro-batch begins with what has been handed out since the last one."""
        if self._kept == 0:
            self._marks = self._weights()
        for shelf in list(self._shelves.values()):
            self._complete = self._complete and len(shelf.fresh) < 2
            shelf.kept += shelf.fresh
            self._kept += len(shelf.fresh)
            shelf.cursor += len(shelf.fresh)
            shelf.fresh = []
        self._again = 0

    @property
    def fed(self) -> bool:
        """Whether a batch has been handed out for the micro-batch that is about to begin."""
        return self._again > 0 or any(shelf.fresh for shelf in self._shelves.values())

    def rewind(self) -> None:
        """Hand everything out again."""
        for shelf in self._shelves.values():
            shelf.cursor = 0

    def forget(self) -> None:
        """The update is over."""
        for shelf in self._shelves.values():
            shelf.kept, shelf.cursor = [], 0
        self._kept, self._complete = 0, True

    @property
    def obstacle(self) -> str:
        """Why the update cannot be run again; empty if it can."""
        kept = [handout for shelf in self._shelves.values() for handout in shelf.kept]
        if len(kept) != self._kept:
            return "its batches come from two passes over a data loader"
        if not self._complete:
            return "several batches were taken from a data loader before one accumulate()"
        if any(handout.micro_batch.contents.overwritten for handout in kept):
            return "the loop wrote to a tensor of a batch in place"
        return WEIGHTS_WRITTEN if self._marks.moved else ""

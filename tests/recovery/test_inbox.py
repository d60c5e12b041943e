"""The inbox: which notice ends which wait, whoever comes first."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_accelpact.recovery.control import Notice, Superseded
from lightning_accelpact.recovery.inbox import Inbox

STORE: Any = object()


def notice(generation: int, *, stop: bool = False) -> Notice:
    return Notice(generation=generation, rank=2, reason="", time=0.0, stop=stop)


@pytest.mark.parametrize(
    ("told", "ends"),
    [
        (notice(4), False),  # of an older repair: late
        (notice(5), False),  # the call to this very repair
        (notice(6), True),
        (notice(5, stop=True), True),  # who stops does not take part in this repair
        (notice(6, stop=True), True),
    ],
    ids=["older", "same", "newer", "same and stop", "newer and stop"],
)
def test_which_notice_ends_a_wait_of_generation_5(told: Notice, ends: bool) -> None:
    inbox, ended = Inbox(), []
    with inbox.interruptible(5, ended.append):
        inbox.take(told, STORE)
        assert ended == [STORE] * ends
    if ends:  # and if it came before the wait began
        with pytest.raises(Superseded, match=f"rank 2 has called repair {told.generation}"), inbox.interruptible(5, print):
            pytest.fail("waits although it has been told")


def test_an_older_notice_does_not_hide_a_newer_one() -> None:
    inbox = Inbox()
    inbox.take(notice(6), STORE)
    inbox.take(notice(5), STORE)
    assert (inbox.latest.generation, inbox.generation) == (6, 6)


def test_nothing_is_ended_between_two_waits() -> None:
    inbox, ended = Inbox(), []
    with inbox.interruptible(1, ended.append):
        pass
    inbox.take(notice(2), STORE)
    assert ended == []
    with inbox.interruptible(2, ended.append):
        pass


def test_a_wait_that_fails_is_over() -> None:
    inbox, ended = Inbox(), []
    with pytest.raises(RuntimeError), inbox.interruptible(1, ended.append):
        raise RuntimeError
    inbox.take(notice(2), STORE)
    assert ended == []


def test_a_stop_is_not_forgotten() -> None:
    inbox = Inbox()
    stop = notice(1, stop=True)
    inbox.take(stop, STORE)
    inbox.take(notice(2), STORE)
    assert (inbox.stop, inbox.generation) == (stop, 2)


def test_an_empty_inbox() -> None:
    inbox = Inbox()
    assert (inbox.generation, inbox.stop, inbox.control_lost) == (0, None, "")

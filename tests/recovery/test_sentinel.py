"""How a rank parts with its sentinel. What a sentinel finds is in ``tests/integration/test_lost_processes.py``."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest

from lightning_accelpact.recovery import sentinel
from lightning_accelpact.recovery.sentinel import Missing, Sentinel, Watch


def standing_guard(monkeypatch: pytest.MonkeyPatch, life: Any) -> Sentinel:
    """A sentinel whose process does nothing but this."""

    def stand_guard(watch: Watch, rank: int, farewell: int) -> None:
        try:
            life(farewell)
        finally:
            os._exit(0)

    monkeypatch.setattr(sentinel, "_stand_guard", stand_guard)
    return Sentinel(Watch(endpoint=None, rank=0, world_size=1, deadline=1.0, connect=timedelta(seconds=1)))


def test_what_nobody_looked_for_has_not_been_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for a minute loses no rank: its listeners stood still, too."""
    now = 100.0
    monkeypatch.setattr(sentinel.time, "monotonic", lambda: now)
    missing = Missing(0.5)
    seconds = []
    for passed, found in [(0.5, False), (0.5, True), (0.5, True), (60.0, True), (0.5, True), (0.5, False), (0.5, True)]:
        now += passed
        seconds.append(missing.look(found))
    assert seconds == [0.0, 0.5, 1.0, 2.0, 2.5, 0.0, 0.5]


def test_a_rank_leaves_when_its_sentinel_has_heard_the_farewell(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = standing_guard(monkeypatch, lambda farewell: os.read(farewell, 1))
    guard.close()
    with pytest.raises(ProcessLookupError):
        os.kill(guard._pid, 0)


def test_a_sentinel_that_is_stopped_keeps_no_rank_from_leaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "_LAST_WORDS_S", 0.2)
    guard = standing_guard(monkeypatch, lambda farewell: time.sleep(60))
    os.kill(guard._pid, signal.SIGSTOP)
    guard.close()
    with pytest.raises(ProcessLookupError):
        os.kill(guard._pid, 0)


def test_somebody_else_may_have_waited_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = standing_guard(monkeypatch, lambda farewell: None)
    os.waitpid(guard._pid, 0)
    guard.close()

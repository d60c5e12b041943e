"""One session for a process, whatever later runs ask for."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from lightning_accelpact.recovery import session
from lightning_accelpact.recovery.session import Session

OPTIONS = {
    "backend": "gloo",
    "collective_timeout": timedelta(seconds=60),
    "rebuild_timeout": timedelta(seconds=5),
    "heartbeat_deadline": 3.0,
}


class Unconnected(Session):
    """A session without anybody to talk to."""

    def __init__(self, **options: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def no_session(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(session, "_current", None)
    monkeypatch.setattr(session.atexit, "register", lambda function: None)
    monkeypatch.setattr(session.dist, "is_initialized", lambda: session._current is not None)
    yield


def test_a_later_run_gets_the_same_session_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert Unconnected.open(**OPTIONS) is Unconnected.open(**OPTIONS)
    assert caplog.messages == []


def test_options_that_come_too_late_are_said_so(caplog: pytest.LogCaptureFixture) -> None:
    first = Unconnected.open(**OPTIONS)
    assert Unconnected.open(**{**OPTIONS, "collective_timeout": timedelta(seconds=90)}) is first
    assert caplog.messages == [
        "collective_timeout=0:01:30 comes too late: a process keeps that of its first run, 0:01:00"
    ]


def test_a_later_run_without_the_process_groups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Unconnected.open(**OPTIONS)
    monkeypatch.setattr(session.dist, "is_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"remove the destroy_process_group\(\) call"):
        Unconnected.open(**OPTIONS)

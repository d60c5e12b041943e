"""Somebody without the run's secret talks to the control store: nothing he says is believed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import stranger
import torch.distributed as dist
from cluster import free_port

from lightning_accelpact.recovery.control import ControlPlane, Monitor, Notice, Superseded
from lightning_accelpact.recovery.endpoint import Endpoint
from lightning_accelpact.recovery.line import ControlLost
from lightning_accelpact.recovery.secret import Seal

SECRET = b"the secret of this run"
LONG = timedelta(seconds=60)
SHORT = timedelta(seconds=0.3)
LIES = {
    "nothing": b"",
    "garbage": b"\xff\xfe no text",
    "plain": b"no",
    "a wrong secret": Seal(b"another secret", namespace="accelpact", rank=1).close("key", "no").encode(),
}


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(host="127.0.0.1", port=free_port(), hosted_here=True, secret=SECRET)


@pytest.fixture
def planes(endpoint: Endpoint) -> list[ControlPlane]:
    """Three ranks; the first one serves the store."""
    return [
        ControlPlane(endpoint=replace(endpoint, hosted_here=rank == 0), rank=rank, world_size=3, deadline=LONG)
        for rank in range(3)
    ]


@pytest.fixture
def intruder(planes: list[ControlPlane], endpoint: Endpoint) -> dist.Store:
    """The stranger's connection, in the run's namespace."""
    return dist.PrefixStore(endpoint.namespace, stranger.connect(endpoint.port))


def together(planes: list[ControlPlane], job: Callable[[ControlPlane], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(planes)) as pool:
        return list(pool.map(job, planes))


def vote(plane: ControlPlane) -> bool:
    plane.cast("ballot")
    return plane.tally("ballot")


@pytest.mark.parametrize("lie", LIES)
def test_a_false_value_does_not_stand(lie: str, planes: list[ControlPlane], intruder: dist.Store) -> None:
    intruder.set("key", LIES[lie])
    assert planes[0].peek("key") is None
    assert planes[1].settle("key", "yes") == "yes"
    assert planes[2].settle("key", "no") == "yes"
    assert planes[0].rejected == (lie != "nothing")


@pytest.mark.parametrize("lie", LIES)
def test_a_false_value_does_not_end_a_wait(lie: str, planes: list[ControlPlane], intruder: dist.Store) -> None:
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(planes[0].read, "key", otherwise="no")
        intruder.set("key", LIES[lie])
        time.sleep(0.1)
        assert not value.done()
        planes[1].settle("key", "late")
        assert value.result() == "late"


def test_a_wait_for_what_only_a_stranger_writes_ends(planes: list[ControlPlane], intruder: dist.Store) -> None:
    intruder.set("key", b"yes")
    assert planes[0].read("key", otherwise="no", deadline=SHORT) == "no"


def test_a_false_veto_does_not_count(planes: list[ControlPlane], intruder: dist.Store) -> None:
    intruder.set("ballot", b"no")
    assert together(planes, vote) == [True] * 3


@pytest.mark.parametrize("amount", [1, 3, 1000, -1000])
def test_a_false_count_does_not_count(amount: int, planes: list[ControlPlane], intruder: dist.Store) -> None:
    intruder.add("ballot/count", amount)
    for plane in planes[:2]:
        plane.cast("ballot")
    assert planes[0].peek("ballot") is None  # whatever the count says, rank 2 has not voted
    planes[2].cast("ballot")
    assert together(planes, lambda plane: plane.tally("ballot")) == [True] * 3


@pytest.mark.parametrize("text", ["no number", ""])
def test_a_count_that_is_no_number_does_no_harm(text: str, planes: list[ControlPlane], intruder: dist.Store) -> None:
    intruder.set("ballot/count", text)
    assert together(planes, vote) == [True] * 3


def test_a_vote_of_an_earlier_ballot_does_not_count(planes: list[ControlPlane], intruder: dist.Store) -> None:
    for plane in planes:
        plane.cast("earlier")
    old = intruder.get("ballot/2")
    planes[0].cast("ballot")
    intruder.set("ballot/2", old)
    intruder.add("ballot/count", 1)
    planes[1].cast("ballot")  # the third one in the count
    assert planes[0].read("ballot", otherwise="no", deadline=SHORT) == "no"


def test_another_ranks_vote_does_not_count(planes: list[ControlPlane], intruder: dist.Store) -> None:
    for plane in planes[:2]:
        plane.cast("ballot")
    intruder.set("ballot/2", intruder.get("ballot/1"))
    planes[0].cast("ballot")  # the third one in the count
    assert planes[0].read("ballot", otherwise="no", deadline=SHORT) == "no"


def test_a_vote_that_was_overwritten_or_deleted_is_cast_again(planes: list[ControlPlane], intruder: dist.Store) -> None:
    planes[0].cast("ballot")
    planes[1].cast("ballot")
    intruder.set("ballot/0", b"garbage")
    intruder.delete_key("ballot/1")
    planes[2].cast("ballot")
    assert together(planes, lambda plane: plane.tally("ballot")) == [True] * 3


def test_an_outcome_that_was_overwritten_is_found_again(planes: list[ControlPlane], intruder: dist.Store) -> None:
    for plane in planes:
        plane.cast("ballot")
    for lie in (b"no", b"garbage"):
        intruder.set("ballot", lie)
        assert planes[1].tally("ballot")
    intruder.delete_key("ballot")
    assert planes[2].tally("ballot")


def test_a_false_answer_is_not_taken(planes: list[ControlPlane], intruder: dist.Store) -> None:
    intruder.set("topic/1", b'{"rank": 7}')
    assert together(planes, lambda plane: plane.exchange("topic", {"rank": plane.rank})) == [
        [{"rank": rank} for rank in range(3)]
    ] * 3


def test_an_answer_that_was_overwritten_is_given_again(planes: list[ControlPlane], intruder: dist.Store) -> None:
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(planes[rank].exchange, "topic", {"rank": rank}) for rank in (0, 1)]
        intruder.wait(["topic/0", "topic/1"])
        intruder.set("topic/0", b"garbage")
        last = pool.submit(planes[2].exchange, "topic", {"rank": 2})
        assert [one.result() for one in (*early, last)] == [[{"rank": rank} for rank in range(3)]] * 3


def test_answers_that_are_never_there_at_once_are_collected(planes: list[ControlPlane], intruder: dist.Store) -> None:
    """Each time somebody else has written over the others."""
    answers = {}
    for rank in (1, 2):
        planes[rank].settle(f"topic/{rank}", "{}")
        answers[rank] = intruder.get(f"topic/{rank}")
        intruder.set(f"topic/{rank}", b"garbage")
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(planes[0].exchange, "topic", {})
        for rank in (1, 2):
            intruder.set(f"topic/{rank}", answers[rank])
            time.sleep(0.3)
            intruder.set(f"topic/{rank}", b"garbage")
        assert outcome.result() == [{}, {}, {}]


def test_an_answer_of_an_earlier_repair_is_not_taken(planes: list[ControlPlane], intruder: dist.Store) -> None:
    together(planes, lambda plane: plane.exchange("report/1", {"old": True}))
    intruder.set("report/2/2", intruder.get("report/1/2"))
    with pytest.raises(Superseded, match=r"ranks \[1, 2\] did not answer"):
        planes[0].exchange("report/2", {}, deadline=SHORT)


def test_an_answer_of_another_rank_is_not_taken(planes: list[ControlPlane]) -> None:
    planes[1].settle("topic/1", "{}")
    planes[1].settle("topic/2", "{}")  # with the secret, and still not rank 2's
    with pytest.raises(Superseded, match=r"ranks \[2\] did not answer"):
        planes[0].exchange("topic", {}, deadline=SHORT)


def test_a_register_that_is_overwritten_without_end_is_given_up(
    planes: list[ControlPlane], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(1000))
    monkeypatch.setattr(planes[0].store, "compare_set", lambda *_: b"garbage %d" % next(numbers), raising=False)
    with pytest.raises(ControlLost, match="keeps writing to key"):
        planes[0].settle("key", "yes")


# -- notices

NOTICE = Notice(generation=1, rank=1, reason="genuine", time=1.5)


@pytest.fixture
def heard(planes: list[ControlPlane]) -> Iterator[list[Notice]]:
    """What rank 0 is told, or ``None`` if it loses the store."""
    notices: list[Any] = []
    monitor = Monitor(planes[0], lambda notice, _: notices.append(notice), lambda _: notices.append(None))
    yield notices
    monitor.close()


@pytest.mark.parametrize("lie", [*LIES, "a call without a notice"])
def test_only_a_genuine_notice_is_heard(
    lie: str, planes: list[ControlPlane], intruder: dist.Store, heard: list[Notice]
) -> None:
    if lie in LIES:
        intruder.set("notice/1", LIES[lie])
    intruder.set("wake/1/0", "")
    time.sleep(0.2)
    assert heard == []
    planes[1].notify(NOTICE)
    while not heard:
        time.sleep(0.01)
    assert heard == [NOTICE]


def test_a_notice_of_an_earlier_repair_is_not_heard_again(
    planes: list[ControlPlane], intruder: dist.Store, heard: list[Notice]
) -> None:
    planes[1].notify(NOTICE)
    while not heard:
        time.sleep(0.01)
    intruder.set("notice/2", intruder.get("notice/1"))
    intruder.set("wake/2/0", "")
    time.sleep(0.2)
    assert heard == [NOTICE]


# -- the beginning


def test_ranks_with_one_secret_meet(planes: list[ControlPlane]) -> None:
    together(planes, lambda plane: plane.greet())


def test_a_rank_with_another_secret_is_named(planes: list[ControlPlane], endpoint: Endpoint) -> None:
    wrong = replace(endpoint, hosted_here=False, secret=b"the secret of another run")
    planes[2] = ControlPlane(endpoint=wrong, rank=2, world_size=3, deadline=LONG)

    def greet(plane: ControlPlane) -> str:
        with pytest.raises(RuntimeError, match="hand the same ACCELPACT_SECRET") as caught:
            plane.greet()
        return str(caught.value).partition(":")[0]

    assert together(planes, greet) == [
        "ranks [2] do not have the secret of rank 0",
        "ranks [2] do not have the secret of rank 1",
        "ranks [0, 1] do not have the secret of rank 2",
    ]


def test_a_false_greeting_is_replaced(planes: list[ControlPlane], intruder: dist.Store) -> None:
    for rank in range(3):
        intruder.set(f"hello/{rank}", b"garbage")
    together(planes, lambda plane: plane.greet())


def test_a_greeting_that_was_deleted_is_given_again(planes: list[ControlPlane], intruder: dist.Store) -> None:
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(planes[rank].greet) for rank in (0, 1)]
        intruder.wait(["hello/0", "hello/1"])
        for rank in (0, 1):  # which wait for the third
            intruder.set(f"hello/{rank}", b"")
        last = pool.submit(planes[2].greet)
        for one in (*early, last):
            one.result()


# -- the store itself


def test_garbage_does_not_end_the_store(planes: list[ControlPlane], endpoint: Endpoint) -> None:
    connections = stranger.garbage(endpoint.port) + stranger.garbage(endpoint.port)
    time.sleep(0.2)
    assert together(planes, vote) == [True] * 3
    for connection in connections:
        connection.close()
    assert planes[0].settle("key", "value") == "value"


def test_a_flood_does_not_change_a_vote(
    planes: list[ControlPlane], endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with stranger.Stranger(endpoint.port, stranger.forge, pause=0.0) as flood, caplog.at_level(logging.WARNING, "accelpact"):
        while flood.rounds < 2:
            time.sleep(0.01)
        for _ in range(20):
            assert len({plane.settle(f"key/{threading.get_ident()}", "one") for plane in planes}) == 1
        assert together(planes, vote) == [True] * 3
    assert len(caplog.records) <= len(planes)


def test_the_store_listens_on_its_address_alone(planes: list[ControlPlane], endpoint: Endpoint) -> None:
    assert stranger.listening(endpoint.port) == {"127.0.0.1"}

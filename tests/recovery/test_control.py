"""The control plane: registers that all read alike, notices that every rank hears, waits that end."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from cluster import free_port
from stranger import listening

from lightning_accelpact.recovery import sockets
from lightning_accelpact.recovery.control import ControlPlane, Monitor, Notice, Superseded
from lightning_accelpact.recovery.endpoint import Endpoint, interface_address
from lightning_accelpact.recovery.line import ControlLost, InterruptibleStore, Line, Unanswered

LONG = timedelta(seconds=60)  # never reached: a test that waits for it fails by the suite's own timeout
SHORT = timedelta(seconds=0.2)

MakePlanes = Callable[..., list[ControlPlane]]


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(host="127.0.0.1", port=free_port(), hosted_here=True)


@pytest.fixture
def planes(endpoint: Endpoint) -> Iterator[MakePlanes]:
    """The control planes of a small world, all in this process; the first one serves the store."""
    made: list[ControlPlane] = []

    def make(world_size: int = 3, deadline: timedelta = LONG) -> list[ControlPlane]:
        for rank in range(world_size):
            here = replace(endpoint, hosted_here=rank == 0)
            plane = ControlPlane(endpoint=here, rank=rank, world_size=world_size, deadline=LONG)
            plane.deadline = deadline  # for its waits alone, since a connection may take longer
            made.append(plane)
        return list(made)

    yield make


def together(planes: list[ControlPlane], job: Callable[[ControlPlane], Any]) -> list[Any]:
    """What ``job`` gives on every rank, each in a thread of its own; an exception counts as its value."""
    ready = threading.Barrier(len(planes))

    def run(plane: ControlPlane) -> Any:
        ready.wait()
        try:
            return job(plane)
        except (Superseded, ControlLost) as error:
            return error

    with ThreadPoolExecutor(len(planes)) as pool:
        return list(pool.map(run, planes))


def until(condition: Callable[[], Any]) -> None:
    """Wait for another thread; the suite's timeout ends a wait in vain."""
    while not condition():
        time.sleep(0.005)


# -- registers


def test_the_first_write_stands(planes: MakePlanes) -> None:
    first, second, _ = planes()
    assert first.settle("key", "one") == "one"
    assert second.settle("key", "two") == "one"
    assert first.settle("key", "three") == "one"
    assert second.read("key", otherwise="no") == "one"


def test_writers_at_the_same_time_agree(planes: MakePlanes) -> None:
    world = planes()
    for attempt in range(50):
        stood = together(world, lambda plane: plane.settle(f"key/{attempt}", f"rank {plane.rank}"))
        assert len(set(stood)) == 1


def test_a_read_waits_for_the_value(planes: MakePlanes) -> None:
    reader, writer, _ = planes()
    with ThreadPoolExecutor(1) as pool:
        value = pool.submit(reader.read, "key", otherwise="no")
        time.sleep(0.05)
        assert not value.done()
        writer.settle("key", "late")
        assert value.result() == "late"


def test_a_read_in_vain_settles_the_register_for_all(planes: MakePlanes) -> None:
    reader, writer, _ = planes(deadline=SHORT)
    assert reader.read("key", otherwise="no") == "no"
    assert writer.settle("key", "too late") == "no"


def test_a_deadline_of_its_own(planes: MakePlanes) -> None:
    reader, *_ = planes(deadline=LONG)
    assert reader.read("key", otherwise="no", deadline=SHORT) == "no"


def test_readers_agree_with_a_writer_at_the_deadline(planes: MakePlanes) -> None:
    world = planes()
    for plane in world:
        plane.deadline = timedelta(seconds=0.03)  # of what it waits for, not of each word with the store

    def job(plane: ControlPlane) -> str:
        if plane.rank == 0:
            time.sleep(0.02 + 0.002 * (attempt % 10))
            return plane.settle(f"key/{attempt}", "yes")
        return plane.read(f"key/{attempt}", otherwise="no")

    seen = set()
    for attempt in range(30):
        answers = set(together(world, job))
        assert len(answers) == 1
        seen |= answers
    assert "no" in seen  # the deadline was met for real


# -- ballots


def test_a_ballot_passes_when_all_have_voted(planes: MakePlanes) -> None:
    def vote(plane: ControlPlane) -> bool:
        plane.cast("ballot")
        return plane.tally("ballot")

    assert together(planes(), vote) == [True, True, True]


def test_a_ballot_without_all_votes_fails_for_all(planes: MakePlanes) -> None:
    world = planes(deadline=SHORT)

    def vote(plane: ControlPlane) -> bool:
        if plane.rank != 2:
            plane.cast("ballot")
        return plane.tally("ballot")

    assert together(world, vote) == [False, False, False]
    world[2].cast("ballot")  # the last vote comes too late
    assert [plane.tally("ballot") for plane in world] == [False, False, False]


def test_a_veto_stands_against_later_votes(planes: MakePlanes) -> None:
    world = planes()
    assert world[1].veto("ballot") is False
    for plane in world:
        plane.cast("ballot")
    assert [plane.tally("ballot") for plane in world] == [False] * 3


def test_a_veto_comes_too_late_for_a_passed_ballot(planes: MakePlanes) -> None:
    world = planes()
    for plane in world:
        plane.cast("ballot")
    assert world[1].veto("ballot") is True
    assert [plane.tally("ballot") for plane in world] == [True] * 3


def test_a_veto_through_the_monitors_store_ends_a_wait(planes: MakePlanes, endpoint: Endpoint) -> None:
    waiting, *_ = planes()
    other = endpoint.connect(LONG)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(waiting.tally, "ballot")
        time.sleep(0.05)
        waiting.veto("ballot", store=other)
        assert outcome.result() is False


# -- exchanges


def test_an_exchange_gives_all_messages_in_rank_order(planes: MakePlanes) -> None:
    results = together(planes(), lambda plane: plane.exchange("topic", {"rank": plane.rank, "text": 'a "quoted" ü'}))
    assert results == [[{"rank": rank, "text": 'a "quoted" ü'} for rank in range(3)]] * 3


def test_topics_do_not_mix(planes: MakePlanes) -> None:
    def job(plane: ControlPlane) -> list[Any]:
        return [plane.exchange(f"topic/{number}", {"n": number})[0]["n"] for number in range(3)]

    assert together(planes(), job) == [[0, 1, 2]] * 3


def test_answers_that_all_have_read_are_deleted(planes: MakePlanes) -> None:
    world = planes()
    for number in range(4):
        assert together(world, lambda plane: plane.exchange(f"topic/{number}", {"n": number})) == [[{"n": number}] * 3] * 3
    left = {number for number in range(4) for rank in range(3) if world[0].peek(f"topic/{number}/{rank}") is not None}
    assert left == {3}


def test_a_silent_rank_ends_the_exchange_for_all(planes: MakePlanes) -> None:
    world = planes(deadline=SHORT)
    silent = world.pop(1)
    for error in together(world, lambda plane: plane.exchange("topic", {})):
        assert isinstance(error, Superseded)
        assert str(error) == "ranks [1] did not answer in topic"
    # and for itself, when it comes at last
    with pytest.raises(Superseded, match=r"ranks \[1\] did not answer"):
        silent.exchange("topic", {})


def test_an_answer_at_the_deadline_counts_for_all_or_none(planes: MakePlanes) -> None:
    world = planes()
    deadline = timedelta(seconds=0.03)

    def job(plane: ControlPlane) -> str:
        if plane.rank == 2:
            time.sleep(0.02 + 0.002 * (attempt % 10))
        return json.dumps(plane.exchange(f"topic/{attempt}", {"rank": plane.rank}, deadline=deadline))

    for attempt in range(30):
        assert len({str(answer) for answer in together(world, job)}) == 1


def test_abandoning_ends_an_exchange_for_who_waits(planes: MakePlanes, endpoint: Endpoint) -> None:
    waiting, *_ = planes()
    other = endpoint.connect(LONG)
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(waiting.exchange, "topic", {})
        time.sleep(0.05)
        waiting.abandon("topic", store=other)
        with pytest.raises(Superseded, match=r"ranks \[1, 2\] did not answer"):
            outcome.result()


def test_abandoning_what_is_complete_changes_nothing(planes: MakePlanes) -> None:
    world = planes()
    for plane in world:
        plane.settle(f"topic/{plane.rank}", json.dumps({"rank": plane.rank}))
    world[0].abandon("topic")
    assert world[1].exchange("topic", {}) == [{"rank": rank} for rank in range(3)]


# -- notices


def notice(generation: int, rank: int = 0, *, stop: bool = False) -> Notice:
    return Notice(generation=generation, rank=rank, reason=f"of rank {rank}", time=1.5, stop=stop)


class Ear:
    """The monitor of one rank and all it has heard."""

    def __init__(self, plane: ControlPlane) -> None:
        self.heard: list[Notice] = []
        self.lost: list[str] = []
        self.monitor = Monitor(plane, lambda one, store: self.heard.append(one), self.lost.append)
        self.plane = plane


@pytest.fixture
def ears() -> Iterator[Callable[[list[ControlPlane]], list[Ear]]]:
    made: list[Ear] = []

    def listen(planes: list[ControlPlane]) -> list[Ear]:
        made.extend(map(Ear, planes))
        return list(made)

    yield listen
    for ear in made:
        if not ear.lost:
            ear.monitor.close()


MakeEars = Callable[[list[ControlPlane]], list[Ear]]


def test_every_monitor_hears_a_notice(planes: MakePlanes, ears: MakeEars) -> None:
    world = planes()
    listening = ears(world)
    world[1].notify(notice(1, rank=1))
    until(lambda: all(ear.heard for ear in listening))
    assert [ear.heard for ear in listening] == [[notice(1, rank=1)]] * 3
    assert [(ear.monitor.noticed, ear.monitor.latest) for ear in listening] == [(1, notice(1, rank=1))] * 3


def test_the_first_notice_of_a_generation_stands(planes: MakePlanes, ears: MakeEars) -> None:
    world = planes()
    listening = ears(world)
    for attempt in range(1, 21):
        together(world, lambda plane: plane.notify(notice(attempt, plane.rank)))
        until(lambda: all(len(ear.heard) >= attempt for ear in listening))
        assert len({ear.heard[-1].rank for ear in listening}) == 1
    assert [[one.generation for one in ear.heard] for ear in listening] == [list(range(1, 21))] * 3


def test_a_stop_moves_on_to_a_free_generation(planes: MakePlanes, ears: MakeEars) -> None:
    world = planes()
    world[0].notify(notice(1, rank=0))
    world[1].notify(notice(2, rank=1))
    world[2].notify(notice(1, rank=2, stop=True))
    listening = ears(world)  # started after all that: still hears everything, in order
    until(lambda: all(len(ear.heard) == 3 for ear in listening))
    expected = [notice(1, rank=0), notice(2, rank=1), replace(notice(1, rank=2, stop=True), generation=3)]
    assert [ear.heard for ear in listening] == [expected] * 3


def test_two_stops_at_once_are_both_heard(planes: MakePlanes, ears: MakeEars) -> None:
    world = planes()
    listening = ears(world)
    together(world[:2], lambda plane: plane.notify(notice(1, plane.rank, stop=True)))
    until(lambda: all(len(ear.heard) == 2 for ear in listening))
    assert all({one.rank for one in ear.heard} == {0, 1} for ear in listening)
    assert all([one.generation for one in ear.heard] == [1, 2] for ear in listening)


def test_a_monitor_closes_without_noise(
    planes: MakePlanes, ears: MakeEars, capfd: pytest.CaptureFixture[str]
) -> None:
    world = planes()
    listening = ears(world)
    world[0].notify(notice(1))
    until(lambda: all(ear.heard for ear in listening))
    threads = [ear.monitor._thread for ear in listening]
    for ear in listening:
        ear.monitor.close()
    assert not any(thread.is_alive() for thread in threads)
    assert [(len(ear.heard), ear.lost) for ear in listening] == [(1, [])] * 3
    assert capfd.readouterr() == ("", "")


def test_closing_one_monitor_leaves_the_others_listening(planes: MakePlanes, ears: MakeEars) -> None:
    world = planes()
    listening = ears(world)
    listening[0].monitor.close()
    world[1].notify(notice(1, rank=1))
    until(lambda: listening[1].heard and listening[2].heard)
    assert listening[0].heard == []


def test_a_lost_store_is_reported_and_raises(planes: MakePlanes, ears: MakeEars) -> None:
    world = planes()
    listening = ears(world)
    world[0]._server = None  # whoever serves it has died
    until(lambda: all(ear.lost for ear in listening))
    assert all(len(ear.lost) == 1 and not ear.heard for ear in listening)
    for operation in (
        lambda plane: plane.settle("key", "value"),
        lambda plane: plane.read("key", otherwise="no"),
        lambda plane: plane.cast("ballot"),
        lambda plane: plane.exchange("topic", {}),
        lambda plane: plane.notify(notice(1)),
    ):
        with pytest.raises(ControlLost):
            operation(world[1])


def test_a_store_lost_during_a_wait_ends_it(planes: MakePlanes) -> None:
    world = planes()
    with ThreadPoolExecutor(2) as pool:
        read = pool.submit(world[1].read, "key", otherwise="no")
        exchange = pool.submit(world[2].exchange, "topic", {})
        time.sleep(0.05)
        world[0]._server = None
        for outcome in (read, exchange):
            with pytest.raises(ControlLost):
                outcome.result()


# -- leaving


def test_the_serving_rank_leaves_last(planes: MakePlanes) -> None:
    world = planes()
    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(world[0].close, LONG)
        for plane in world[1:]:
            time.sleep(0.03)
            assert not leaving.done()
            plane.settle("key", "still served")
            plane.close(LONG)
        leaving.result()
    assert world[0]._server is None


def test_it_does_not_wait_for_a_rank_that_is_gone(planes: MakePlanes) -> None:
    world = planes()
    world[0].close(SHORT)
    assert world[0]._server is None


def test_whoever_leaves_after_the_store_is_gone_leaves_quietly(
    planes: MakePlanes, ears: MakeEars, capfd: pytest.CaptureFixture[str]
) -> None:
    world = planes()
    late = ears(world)[2]
    world[0].close(SHORT)
    until(lambda: late.lost)
    for _ in range(2):  # the first write to a connection that the other end has closed may succeed
        late.monitor.close()
        world[2].close(LONG)
    assert not late.monitor._thread.is_alive()
    assert "Traceback" not in capfd.readouterr().err


# -- the store for making groups


def test_a_wait_on_the_groups_store_is_ended_from_another_thread(planes: MakePlanes, endpoint: Endpoint) -> None:
    world = planes()
    meeting = InterruptibleStore(endpoint, LONG)
    store = meeting.for_generation(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.wait, ["never"])
        time.sleep(0.05)
        assert not waiting.done()
        meeting.cut()
        with pytest.raises(dist.DistError):
            waiting.result()
    assert world[0].settle("key", "value") == "value"  # nobody else's connection was shut
    again = meeting.for_generation(2)
    again.set("key", "value")
    assert again.get("key") == b"value"


def test_generations_share_no_keys(planes: MakePlanes, endpoint: Endpoint) -> None:
    planes()
    meeting = InterruptibleStore(endpoint, LONG)
    meeting.for_generation(1).set("address", "of the dead group")
    assert not meeting.for_generation(2).check(["address"])
    assert meeting.for_generation(1).check(["address"])


def test_cutting_before_there_is_a_connection_is_nothing(endpoint: Endpoint) -> None:
    InterruptibleStore(endpoint, LONG).cut()


# -- where the store is


def made(monkeypatch: pytest.MonkeyPatch, rank: int, **environment: str) -> Endpoint:
    for name in ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Endpoint.from_environment(host="127.0.0.1", port=1234, rank=rank, world_size=2, interface=None, deadline=LONG)


def test_rank_0_serves_the_store_unless_an_agent_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [made(monkeypatch, rank).hosted_here for rank in (0, 1)] == [True, False]
    assert not made(monkeypatch, 0, TORCHELASTIC_USE_AGENT_STORE="True").hosted_here


def test_attempts_of_a_relaunched_job_share_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    namespaces = {made(monkeypatch, 0, TORCHELASTIC_RESTART_COUNT=str(count)).namespace for count in range(3)}
    assert len(namespaces) == 3


def test_the_store_moves_to_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    port = free_port()

    def join(rank: int) -> ControlPlane:
        endpoint = Endpoint.from_environment(host="127.0.0.1", port=port, rank=rank, world_size=2, interface="lo", deadline=LONG)
        return ControlPlane(endpoint=endpoint, rank=rank, world_size=2, deadline=LONG)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(join, range(2))
    assert first.endpoint.host == "127.0.0.1"
    assert first.endpoint.port == second.endpoint.port != port
    assert listening(first.endpoint.port) == {"127.0.0.1"}
    assert listening(port) == set()  # the meeting point has served its turn
    assert first.settle("key", "value") == second.settle("key", "other") == "value"


def test_the_loopback_interface_has_its_address() -> None:
    assert interface_address("lo") == "127.0.0.1"


def test_an_unknown_interface_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError) as caught:
        interface_address("nowhere0")
    assert "control_interface='nowhere0' is not an interface with an IPv4 address" in str(caught.value)
    assert "'lo'" in str(caught.value)


# -- a connection that breaks


@pytest.fixture
def line(endpoint: Endpoint) -> Iterator[Callable[[], Line]]:
    """Connections to a store that is there until the test is over."""
    server = endpoint.serve()
    yield lambda: Line(replace(endpoint, hosted_here=False), LONG)
    del server


def cut(endpoint: Endpoint) -> int:
    """Shut every connection to the store; returns how many there were."""
    links = [(fd, inode) for fd, inode in sockets.open_sockets().items() if endpoint.port in sockets.ports(fd)]
    return sum(sockets.shut(fd, inode) for fd, inode in links)


def test_operations_go_on_over_a_new_connection(endpoint: Endpoint, line: Callable[[], Line]) -> None:
    one = line()
    one.set("a", "1")
    operations: list[Callable[[], Any]] = [
        lambda: one.get("a"),
        lambda: one.check(["a"]),
        lambda: one.wait(["a"], LONG),
        lambda: one.compare_set("b", "", "2"),
        lambda: one.multi_get(["a", "b"]),
        lambda: one.delete_key("a"),
    ]
    answers = []
    for operation in operations:
        assert cut(endpoint)
        answers.append(operation())
    assert answers == [b"1", True, None, b"2", [b"1", b"2"], True]


def test_a_wait_goes_on_over_a_new_connection(endpoint: Endpoint, line: Callable[[], Line]) -> None:
    waiting, other = line(), line()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(waiting.wait, ["late"], LONG)
        time.sleep(0.1)
        assert not ended.done()
        assert cut(endpoint)
        time.sleep(0.1)
        assert not ended.done()
        other.set("late", "")
        ended.result(30)


def test_what_may_have_been_counted_is_not_counted_again(endpoint: Endpoint, line: Callable[[], Line]) -> None:
    one = line()
    assert one.add("count", 1) == 1
    cut(endpoint)
    with pytest.raises(Unanswered):
        one.add("count", 1)
    assert one.add("count", 1) in (2, 3)


def test_a_vote_whose_connection_breaks_counts(endpoint: Endpoint, planes: MakePlanes) -> None:
    first, second = planes(2)
    cut(endpoint)
    first.cast("ballot")
    cut(endpoint)
    second.cast("ballot")
    assert [plane.tally("ballot") for plane in (first, second)] == [True, True]


def test_a_vote_counted_twice_makes_up_for_no_other(endpoint: Endpoint, planes: MakePlanes) -> None:
    first, second = planes(2, deadline=SHORT)
    first.store.add("ballot/count", 1)  # as if it had been counted before the connection broke
    first.cast("ballot")
    assert [plane.tally("ballot") for plane in (first, second)] == [False, False]


# -- a start that fails says why


def test_ranks_that_do_not_come_to_the_start_are_named(planes: MakePlanes) -> None:
    first, *_ = planes(deadline=SHORT)
    with pytest.raises(RuntimeError, match=r"ranks \[1, 2\] of 3 have not come to the start within \w+=0.2 s"):
        first.greet()


def test_an_address_that_is_taken_is_named(endpoint: Endpoint) -> None:
    with socket.create_server((endpoint.host, endpoint.port)):
        with pytest.raises(OSError, match=f"127.0.0.1:{endpoint.port} .*choose another MASTER_ADDR"):
            endpoint.serve()


def test_a_host_that_is_unknown_is_named(endpoint: Endpoint) -> None:
    with pytest.raises(OSError, match="control store on nowhere.invalid:"):
        replace(endpoint, host="nowhere.invalid").serve()

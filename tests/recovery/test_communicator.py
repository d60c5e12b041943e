"""Communicators: which errors are theirs, how blocked collectives are woken, what a repair keeps."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, ClassVar

import jobs_recovery
import pytest
import torch
import torch.distributed as dist
from cluster import run_ranks, values

from lightning_accelpact.recovery import c10d, communicator, sockets
from lightning_accelpact.recovery.communicator import (
    CommunicatorLost,
    GlooLinks,
    NcclLinks,
    dispose,
    end_disposals,
    is_communication_error,
)
from lightning_accelpact.recovery.fault import InjectedFault

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/"

# As Gloo, NCCL and the stores have worded them
COMMUNICATION: list[BaseException] = [
    RuntimeError(GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:27331. This is typically caused by a remote"
                 " worker crashing."),
    RuntimeError(GLOO + "pair.cc:537] Read error [127.0.0.1]:59567: Connection reset by peer."),
    RuntimeError(GLOO + "unbound_buffer.cc:78] Timed out waiting 200ms for recv operation to complete"),
    RuntimeError("Gloo connectFullMesh failed with [/pytorch/gloo.cc:1] Connection refused, remote=[10.0.0.1]:1"),
    RuntimeError("Broken pipe"),
    RuntimeError("NCCL communicator was aborted on rank 1."),
    dist.DistNetworkError("failed to recv, got 0 bytes"),
    dist.DistStoreError("wait timeout after 300ms, keys: /groups/4/0//cpu//0/1"),
    dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp, remote process exited or there was a network error"),
    CommunicatorLost("rebuilding generation 4 failed"),
    InjectedFault("injected: backward of update 3 on rank 3"),
]  # fmt: skip

OTHER: list[BaseException] = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x16 and 8x2)"),
    RuntimeError("element 0 of tensors does not require grad and does not have a grad_fn"),
    RuntimeError("Trying to backward through the graph a second time"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    ValueError("connection string is empty"),
    ConnectionError("Connection refused"),  # the user's own traffic: collectives raise no OSError
    KeyError("gloo"),
    RuntimeError("[rank0]:[F1201 ProcessGroupGloo.cpp:1537] Check failed: outputShape[0] * worldSize == inputShape[0]"),
    RuntimeError("ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected (8, 3), got (6))"),
    RuntimeError("[enforce fail at /pytorch/third_party/gloo/gloo/alltoall.cc:30] in->size == out->size. "),
    KeyboardInterrupt(),
    SystemExit("nccl"),
]  # fmt: skip


def named(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[-40:]}"


@pytest.mark.parametrize("error", COMMUNICATION, ids=named)
def test_is_a_communication_error(error: BaseException) -> None:
    assert is_communication_error(error)


@pytest.mark.parametrize("error", OTHER, ids=named)
def test_is_none(error: BaseException) -> None:
    assert not is_communication_error(error)


@pytest.fixture(scope="module")
def real_errors() -> dict[str, tuple[str, str, bool]]:
    """What rank 0 of two has met: by way of failing, (type, message, whether it is recognised)."""
    survivor, gone = run_ranks(jobs_recovery.real_errors, 2)
    assert (survivor.exit_code, gone.value) == (0, None), survivor.error + survivor.output
    return survivor.value


@pytest.mark.parametrize("way", ["timeout", "cut", "interrupted", "process gone", "rebuilt alone", "store"])
def test_what_this_torch_really_raises_is_recognised(
    way: str, real_errors: dict[str, tuple[str, str, bool]]
) -> None:
    kind, message, recognised = real_errors[way]
    assert recognised, f"{kind}: {message}"


def test_a_rebuild_that_fails_says_which_one(real_errors: dict[str, tuple[str, str, bool]]) -> None:
    kind, message, _ = real_errors["rebuilt alone"]
    assert kind == "CommunicatorLost"
    assert message.startswith("rebuilding generation 4 failed: ")


# -- interrupting


@pytest.fixture(scope="module")
def interrupts() -> list[dict[str, Any]]:
    return values(run_ranks(jobs_recovery.interrupts, 2))


def test_an_interrupt_wakes_a_blocked_all_reduce_here_and_at_the_peer(interrupts: list[dict[str, Any]]) -> None:
    for facts in interrupts:
        assert facts["woken"] and facts["peer"]
        assert facts["well_before_the_timeout"]


def test_health_follows_the_links(interrupts: list[dict[str, Any]]) -> None:
    assert all(facts["healthy"] == [True, False, True] for facts in interrupts)


def test_a_second_interrupt_finds_nothing_up(interrupts: list[dict[str, Any]]) -> None:
    assert all(facts["second"] == 0 for facts in interrupts)


def test_a_late_interrupt_leaves_the_replacements_alone(interrupts: list[dict[str, Any]]) -> None:
    for facts in interrupts:
        assert facts["late"] == [0, 0]
        assert facts["sum"] == 3.0


def test_the_next_generations_interrupt_cuts_them(interrupts: list[dict[str, Any]]) -> None:
    assert sum(facts["next"] for facts in interrupts) > 0  # whoever comes first finds them up


def test_groups_that_others_have_made_are_replaced_as_well(interrupts: list[dict[str, Any]]) -> None:
    assert all(facts["same_names"] and facts["pair_is_new"] for facts in interrupts)


def test_a_repair_that_was_cut_short_knows_all_groups_in_the_next_try() -> None:
    for facts in values(run_ranks(jobs_recovery.half_a_rebuild, 2)):
        assert facts["failure"] == (True, "rebuilding generation 1 failed: connection reset by peer")
        assert facts["retired"] == 1  # the one that had been made
        assert facts["specs"]


# -- Gloo's links: this process's own sockets


@pytest.fixture
def links(monkeypatch: pytest.MonkeyPatch) -> GlooLinks:
    monkeypatch.setattr(c10d, "make_waits_interruptible", lambda interrupted: None)  # it would stay for all tests
    return GlooLinks(silence=3.0)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture
def connect(listener: socket.socket) -> Iterator[Any]:
    """Makes a connection over loopback; both ends are this process's."""
    ends: list[socket.socket] = []

    def make() -> tuple[socket.socket, socket.socket]:
        ends.append(socket.create_connection(listener.getsockname()))
        ends.append(listener.accept()[0])
        return ends[-2], ends[-1]

    yield make
    for end in ends:
        end.close()


def is_up(end: socket.socket) -> bool:
    try:
        return end.send(b"x") == 1
    except OSError:
        return False


def test_the_links_of_a_group_are_those_made_since_the_last_look(links: GlooLinks, connect: Any) -> None:
    others = connect()
    links.watch()
    first = connect()
    links.record("first")
    second = connect()
    links.record("second")
    assert links.healthy()
    assert links.cut(["first"]) == 2  # both ends are here
    assert not links.healthy()
    assert [is_up(pair[0]) for pair in (others, first, second)] == [True, False, True]
    assert links.cut() == 2
    assert [is_up(pair[0]) for pair in (others, second)] == [True, False]
    assert links.cut() == 0


def test_a_name_that_is_unknown_cuts_nothing(links: GlooLinks) -> None:
    assert links.cut(["nobody"]) == 0


def test_forgotten_links_are_neither_cut_nor_unhealthy(links: GlooLinks, connect: Any) -> None:
    links.watch()
    pair = connect()
    links.record("group")
    links.forget()
    assert links.cut() == 0
    pair[0].shutdown(socket.SHUT_RDWR)
    assert links.healthy()


def test_listening_sockets_and_ignored_ports_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, connect: Any, listener: socket.socket
) -> None:
    monkeypatch.setattr(c10d, "make_waits_interruptible", lambda interrupted: None)
    links = GlooLinks(ignored_ports=[listener.getsockname()[1]], silence=3.0)
    links.watch()
    control = connect()
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socketpair()[0]:
        links.record("group")
        assert links.cut() == 0
        socket.create_connection(server.getsockname()).close()
    assert is_up(control[0])


def test_a_descriptor_that_names_another_socket_by_now_is_not_shut(connect: Any) -> None:
    first, second = connect(), connect()
    fd = first[0].fileno()
    inode = sockets.open_sockets()[fd]
    assert sockets.is_established(fd, inode)
    os.dup2(second[0].fileno(), fd)
    assert not sockets.is_established(fd, inode)
    assert not sockets.shut(fd, inode)
    assert is_up(second[0])


def test_a_descriptor_that_is_closed_is_not_shut(connect: Any) -> None:
    end, _ = connect()
    fd = end.fileno()
    inode = sockets.open_sockets()[fd]
    end.close()
    assert not sockets.shut(fd, inode)
    assert not sockets.is_established(fd, inode)
    assert sockets.ports(fd) == (0, 0)


# -- NCCL's links, without a GPU: what is done around the abort


class Event:
    """Stands for a CUDA event."""

    ended: ClassVar[bool] = True

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.ended


def nccl_links(*, timeout: float = 30.0, deadline: float = 30.0) -> NcclLinks:
    return NcclLinks(timeout=timedelta(seconds=timeout), deadline=timedelta(seconds=deadline))


@pytest.fixture
def aborts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(c10d, "abort_all", lambda: calls.append("abort"))
    monkeypatch.setattr(c10d, "nccl_error", lambda: "")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")  # put back afterwards
    return calls


def test_nccl_is_aborted_once_a_generation(aborts: list[str]) -> None:
    links = nccl_links()
    assert links.healthy()
    assert [links.cut(), links.cut(["shard"])] == [1, 0]
    assert not links.healthy()
    with pytest.raises(CommunicatorLost, match="were aborted"):
        links.settle()
    links.watch()
    assert links.healthy()
    assert links.cut() == 1
    assert aborts == ["abort"] * 2


def test_an_abort_that_hangs_is_given_up(aborts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c10d, "abort_all", lambda: time.sleep(1))
    with pytest.raises(CommunicatorLost, match=r"NCCL did not abort within 0\.05 s"):
        nccl_links(deadline=0.05).cut()


def test_there_is_nothing_to_abort_without_process_groups(
    aborts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    assert nccl_links().cut() == 0


def test_what_nccl_reports_is_a_lost_communicator(aborts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    links = nccl_links()
    links.settle()
    monkeypatch.setattr(c10d, "nccl_error", lambda: "NCCL reports REMOTE_ERROR on group 1")
    assert not links.healthy()
    with pytest.raises(CommunicatorLost, match="REMOTE_ERROR on group 1"):
        links.settle()


def test_a_kernel_whose_peer_is_gone_is_not_waited_for_for_ever(
    aborts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Event, "ended", False)
    with pytest.raises(CommunicatorLost, match=r"not finished within 0\.05 s"):
        nccl_links(timeout=0.05).settle()
    links = nccl_links()
    threading.Timer(0.05, links.wake).start()
    with pytest.raises(CommunicatorLost, match="interrupted"):
        links.settle()
    links.watch()
    abort = threading.Timer(0.05, links.cut)
    abort.start()
    with pytest.raises(CommunicatorLost, match="aborted"):
        links.settle()
    abort.join(30)
    assert aborts == ["abort"]


# -- retired groups


def test_retired_groups_are_let_go_of_in_the_background() -> None:
    groups = [object(), object()]
    dispose(groups)  # type: ignore[arg-type]
    deadline = time.monotonic() + 30
    while groups and time.monotonic() < deadline:
        time.sleep(0.001)
    assert groups == []
    assert not hasattr(communicator, "gc")  # a collection of a large heap takes a second


class Retired:
    """Stands for a group; says in which thread it has ended."""

    ended_in: ClassVar[list[str]] = []

    def __del__(self) -> None:
        self.ended_in.append(threading.current_thread().name)


def test_who_still_holds_a_retired_group_does_not_destroy_it() -> None:
    """Its end may take as long as a collective that was left behind."""
    groups = [Retired(), Retired()]
    still_used = groups[0]
    Retired.ended_in.clear()
    dispose(groups)  # type: ignore[arg-type]
    deadline = time.monotonic() + 30
    while len(Retired.ended_in) < 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert groups == [still_used]
    del still_used
    while groups and time.monotonic() < deadline:
        time.sleep(0.001)
    assert Retired.ended_in == ["accelpact-dispose"] * 2


def test_disposals_end_before_the_interpreter_does() -> None:
    still_used = Retired()
    groups = [still_used]
    dispose(groups)  # type: ignore[arg-type]
    end_disposals(30)
    assert not [thread for thread in threading.enumerate() if thread.name == "accelpact-dispose"]
    assert still_used in communicator._left_alive
    communicator._left_alive.clear()

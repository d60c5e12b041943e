"""A probe that is killed, hangs or raises is a result, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import free_port

from lightning_accelpact.qualification.outcome import Rank
from lightning_accelpact.qualification.world import LaunchedWorld, LocalWorld, strip_launcher


def _place() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
    return {name: os.environ[name] for name in names}


def _kill_itself(number: int) -> Any:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    return "well"


def _hang_with_a_child(folder: str) -> Any:
    if os.environ["RANK"] == "0":
        child = os.fork()
        if child:
            Path(folder, "pids").write_text(f"{os.getpid()} {child}")
        time.sleep(600)
    return "well"


def _raise(kind: type[BaseException]) -> Any:
    raise kind("it broke")


def _exit(code: int) -> Any:
    os._exit(code)


def test_every_rank_knows_its_place() -> None:
    outcomes = LocalWorld(3).run(_place, deadline=20)
    assert [outcome.value["RANK"] for outcome in outcomes] == ["0", "1", "2"]
    assert [outcome.value["LOCAL_RANK"] for outcome in outcomes] == ["0", "1", "2"]
    for outcome in outcomes:
        assert {outcome.value[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {"3"}
        assert (outcome.value["NODE_RANK"], outcome.failure) == ("0", "")


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL", "SIGABRT"])
def test_a_rank_that_is_killed_is_a_result(name: str) -> None:
    well, killed = LocalWorld(2).run(_kill_itself, getattr(signal, name), deadline=20)
    assert (well.value, well.failure) == ("well", "")
    assert (killed.value, killed.failure) == (None, f"process killed by {name}")


def test_a_rank_that_hangs_is_a_result_and_is_killed_with_its_children(tmp_path: Path) -> None:
    began = time.monotonic()
    hung, well = LocalWorld(2).run(_hang_with_a_child, str(tmp_path), deadline=1.0)
    assert hung.failure == "hung: still there at the deadline, and killed then"
    assert well.value == "well"
    assert time.monotonic() - began < 30
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert _has_ended(pid)


def _has_ended(pid: int) -> bool:
    """Gone, or left as a zombie to a parent that is not ours."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def _start_and_end(folder: str) -> None:
    """Start a rank that hangs, and end without a word while it does."""
    Rank(_hang_with_a_child, (folder,), {"RANK": "0"})
    while not Path(folder, "pids").exists():
        time.sleep(0.01)
    os._exit(0)


def test_a_rank_ends_with_whoever_has_started_it(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_start_and_end, args=(str(tmp_path),))
    process.start()
    process.join(20)
    rank, child = map(int, (tmp_path / "pids").read_text().split())
    try:
        assert _has_ended(rank)
    finally:
        os.kill(child, signal.SIGKILL)  # a child of the probe's own, which is nobody's to know


@pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
def test_what_a_rank_raises_is_a_result(kind: type[BaseException]) -> None:
    (outcome,) = LocalWorld(1).run(_raise, kind, deadline=20)
    assert outcome.failure.startswith(f"{kind.__name__}: it broke (line ")


def test_a_rank_that_just_ends_is_a_result() -> None:
    (outcome,) = LocalWorld(1).run(_exit, 3, deadline=20)
    assert outcome.failure == "process ended with exit code 3 and no result"


def test_what_a_launcher_has_said_is_taken_out() -> None:
    given = {"RANK": "1", "TORCHELASTIC_RUN_ID": "x", "SLURM_PROCID": "1", "ACCELERATE_USE_FSDP": "1", "MASTER_PORT": "2"}
    assert strip_launcher({**given, "HOME": "/home/me", "NCCL_DEBUG": "INFO"}) == {"HOME": "/home/me", "NCCL_DEBUG": "INFO"}


def test_each_launched_process_watches_one_rank_and_all_know_of_all() -> None:
    """Two launched processes: one of them is this one, and the other one is a process, too."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import test_world as t\n"
        "world = t.LaunchedWorld(deadline=60)\n"
        "print(*[o.value or o.failure for o in world.run(t._kill_itself, 11, deadline=30)], world.leads, sep=';')\n"
        "print(world.run(t._place, deadline=30)[1].value['NODE_RANK'])\n"
        "world.close()\n"
    )
    peer = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent)],
        env={**os.environ, **common, "RANK": "1", "PYTHONPATH": str(Path(__file__).parents[1])},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        world = LaunchedWorld({**common, "RANK": "0"}, deadline=60)
        assert world.leads and world.size == 2
        outcomes = world.run(_kill_itself, signal.SIGSEGV, deadline=30)
        assert [outcome.value or outcome.failure for outcome in outcomes] == ["well", "process killed by SIGSEGV"]
        places = [outcome.value for outcome in world.run(_place, deadline=30)]
        assert [(place["LOCAL_RANK"], place["NODE_RANK"]) for place in places] == [("0", "0"), ("0", "1")]
        world.close()
        assert peer.communicate(timeout=60)[0].splitlines() == ["well;process killed by SIGSEGV;False", "1"]
    finally:
        peer.kill()
        peer.wait()


def test_forks_leave_no_thread_behind() -> None:
    before = threading.active_count()
    LocalWorld(2).run(_place, deadline=20)
    assert threading.active_count() == before

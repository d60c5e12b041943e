"""Attempts put together: no second is lost or counted twice, whatever ends an attempt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lightning_accelpact.goodput import GoodputAccount, GoodputOptions, Ledger, TimeClass, append_jsonl
from lightning_accelpact.goodput.run import Run, RunError, log_path, read_runs, unfinished_attempts
from lightning_accelpact.recovery.incident import Incident


def start(time: float, step: int | None = 0) -> dict[str, Any]:
    return {"kind": "start", "time": time, "step": step, "rank": 0, "world_size": 1}


def totals(time: float, updates: int, ended: str | None = None, unfinished_s: float = 0.0, **spent: float) -> dict:
    return {"kind": "totals", "time": time, "updates": updates, "update_s": 2.0,
            "unfinished_s": unfinished_s, "ended": ended, "totals": spent}  # fmt: skip


def write(folder: Path, *records: dict[str, Any], rank: int = 0) -> None:
    append_jsonl(log_path(folder, rank), records)


def only(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


def test_attempts_and_the_gap_between_them_add_up(tmp_path: Path) -> None:
    write(tmp_path, start(100.0), totals(104.0, 1, productive=2.0, other=2.0))
    write(tmp_path, totals(110.0, 4, productive=8.0, other=2.0, unfinished_s=1.5))
    write(tmp_path, start(125.0, 2), totals(137.0, 6, "completed", productive=9.0, replayed_updates=3.0))
    (rank,) = only(tmp_path).ranks
    spent = {cls: seconds for cls, seconds in rank.totals.items() if seconds}
    assert spent == {
        TimeClass.PRODUCTIVE: 8.0 - 1.5 + 9.0, TimeClass.WASTED_PROGRESS: 1.5, TimeClass.OTHER: 2.0,
        TimeClass.INFRASTRUCTURE_RECOVERY: 15.0, TimeClass.REPLAYED_UPDATES: 3.0,
    }  # fmt: skip
    assert sum(spent.values()) == rank.elapsed == 37.0
    summary = only(tmp_path).summary()
    assert (summary.attempts, summary.updates, summary.wall_s) == (2, 8, 37.0)


def test_a_completed_run_is_not_continued(tmp_path: Path) -> None:
    write(tmp_path, start(0.0), totals(10.0, 5, "completed", productive=10.0))
    assert unfinished_attempts(log_path(tmp_path, 0)) == ()
    write(tmp_path, start(1000.0), totals(1004.0, 2, "failed", productive=4.0))
    assert [one.reached for one in unfinished_attempts(log_path(tmp_path, 0))] == [2]
    write(tmp_path, start(1005.0), totals(1006.0, 1, productive=1.0))
    (rank,) = only(tmp_path).ranks
    assert (len(rank.attempts), rank.elapsed) == (2, 6.0)


def test_an_attempt_of_which_nothing_more_is_known(tmp_path: Path) -> None:
    write(tmp_path, start(0.0), start(20.0), totals(25.0, 1, "completed", productive=5.0))
    (rank,) = only(tmp_path).ranks
    assert rank.totals[TimeClass.INFRASTRUCTURE_RECOVERY] == 20.0
    assert sum(rank.totals.values()) == rank.elapsed == 25.0


def test_a_clock_set_back_makes_no_negative_gap(tmp_path: Path) -> None:
    write(tmp_path, start(100.0), totals(110.0, 1, productive=10.0), start(105.0), totals(107.0, 1, productive=2.0))
    assert only(tmp_path).ranks[0].gaps == [(110.0, 110.0)]


def test_incidents_of_all_attempts_count(tmp_path: Path) -> None:
    names = ("generation", "frontier", "detect_s", "admit_s", "agree_s", "retire_s", "rebuild_s", "rebind_s",
             "validate_s", "total_s", "redo_s", "redone_micro_batches", "rank")  # fmt: skip
    one = {"kind": "incident", "source": "notice", "phase": "forward", "action": "redo", "outcome": "recovered",
           "checkpoint": None, "offset": 0, **dict.fromkeys(names, 1)}  # fmt: skip
    write(tmp_path, start(0.0), {**one, "time": 1.0}, totals(5.0, 2, productive=5.0))
    later = {**one, "time": 7.0, "checkpoint": 0, "offset": 2}
    write(tmp_path, start(6.0, 2), later, totals(9.0, 4, "completed", productive=3.0))
    found = only(tmp_path).summary().incidents
    assert [(incident.frontier, incident.checkpoint) for incident in found] == [(1, None), (3, 2)]
    assert only(tmp_path).summary().updates == 6


def test_attempts_that_do_not_know_their_place_are_added_up(tmp_path: Path) -> None:
    write(tmp_path, start(0.0, None), totals(5.0, 3, productive=5.0))
    write(tmp_path, start(6.0, None), totals(9.0, 4, "completed", productive=3.0))
    assert only(tmp_path).summary().updates == 7


def test_a_file_of_another_version_begins_anew(tmp_path: Path) -> None:
    write(tmp_path, {"kind": "start"})
    assert unfinished_attempts(log_path(tmp_path, 0)) == ()
    with pytest.raises(RunError, match="another version"):
        read_runs([tmp_path])


# -- the account that writes it


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def account_on(folder: Path, clock: Clock) -> GoodputAccount:
    return GoodputAccount(Ledger(clock, base=TimeClass.PRODUCTIVE), GoodputOptions(log_dir=folder))


@pytest.mark.parametrize(("step", "replayed_s"), [(3, 4.0), (0, 8.0), (5, 0.0), (None, 0.0)])
def test_updates_committed_before_become_replays(tmp_path: Path, step: int | None, replayed_s: float) -> None:
    write(tmp_path, start(0.0), totals(10.0, 5, productive=10.0))
    clock = Clock()
    account = account_on(tmp_path, clock)
    account.begin(0, resumed=True, step=step)
    for frontier in (1, 2, 3, 4):
        clock.now += 2.0
        account.time_update(frontier)
    spent = account.ledger.totals()
    assert (spent[TimeClass.REPLAYED_UPDATES], spent[TimeClass.PRODUCTIVE]) == (replayed_s, 8.0 - replayed_s)
    assert account.record(4, [])["update_s"] == 2.0


def test_the_summary_of_a_later_attempt_covers_all_of_them(tmp_path: Path) -> None:
    """Also while it goes on; and it is what the files tell afterwards."""
    now = time.time()
    write(tmp_path, start(now - 100.0), totals(now - 90.0, 5, "failed", productive=8.0, other=2.0))
    clock = Clock()
    account = account_on(tmp_path, clock)
    account.begin(0, resumed=True, step=3, reached=6)  # a peer had come further than this rank's last line says
    for frontier in (1, 2, 3, 4):
        clock.now += 2.0
        account.time_update(frontier)
    record = account.run_record(4, [], ended="completed")
    summary = account.conclude([record], completed=True)
    assert (summary.attempts, summary.updates, summary.replayed) == (2, 7, 3)
    assert summary.totals[TimeClass.REPLAYED_UPDATES] == 3 * 2.0
    assert summary.totals[TimeClass.PRODUCTIVE] == 8.0 + 2.0
    assert summary.totals[TimeClass.INFRASTRUCTURE_RECOVERY] == pytest.approx(82.0, abs=1.0)
    read = only(tmp_path).summary()
    assert (read.attempts, read.updates, read.replayed) == (2, 7, 3)
    assert read.totals[TimeClass.REPLAYED_UPDATES] == summary.totals[TimeClass.REPLAYED_UPDATES]


def test_what_comes_before_the_first_update_belongs_to_the_attempt(tmp_path: Path) -> None:
    """A load writes no line of the attempt before, and a fault in set-up is not lost."""
    write(tmp_path, start(0.0), totals(10.0, 5, productive=10.0))
    account = account_on(tmp_path, Clock())
    now_s = time.time() + 1
    early = Incident(rank=0, number=1, generation=1, time=now_s, source="notice", reason="reset", phase="committed",
                     frontier=3, outcome="recovered")  # fmt: skip
    account.checkpoint(3)
    account.take_in([early])
    assert len(log_path(tmp_path, 0).read_text().splitlines()) == 2
    account.begin(3, step=7)
    before, now = only(tmp_path).ranks[0].attempts
    assert (before.checkpoints, before.incidents, now.step) == ((), (), 7)
    assert [(one["frontier"], one["checkpoint"]) for one in now.incidents] == [(7, 7)]


def test_totals_are_kept_every_second_at_first_and_every_half_minute_later(tmp_path: Path) -> None:
    clock = Clock()
    account = account_on(tmp_path, clock)
    account.begin(0)
    for update in range(1, 40_000):
        clock.now += 0.25
        account.time_update(update)
    kept = [line for line in log_path(tmp_path, 0).read_text().splitlines() if '"totals"' in line]
    # 100 in the first 100 s, then each 1 % later up to 3,000 s, then each 30 s
    assert len(kept) == pytest.approx(100 + 340 + 7000 / 30, rel=0.05)


_KILLED = """
import sys, time
from pathlib import Path
from lightning_accelpact.goodput import GoodputAccount, GoodputOptions, Ledger, TimeClass
account = GoodputAccount(Ledger(base=TimeClass.PRODUCTIVE), GoodputOptions(log_dir=Path(sys.argv[1])))
account.begin(0)
update = 0
while True:
    time.sleep(0.01)
    update += 1
    account.time_update(update)
    if update == 130:
        print("ready", flush=True)
"""


def test_a_killed_process_leaves_all_but_the_last_second(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", _KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (attempt,) = only(tmp_path).ranks[0].attempts
    assert attempt.samples and not attempt.completed
    assert 1 <= attempt.reached <= 140
    assert sum(attempt.totals.values()) == pytest.approx(attempt.end - attempt.start, abs=0.05)

"""A real run of four ranks with three incidents and one restart, as its files tell it."""

from __future__ import annotations

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jobs_goodput
import pytest
from browser import count, screenshot
from cluster import run_ranks, values
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from lightning_accelpact.cli import main
from lightning_accelpact.goodput import TimeClass
from lightning_accelpact.goodput.run import Run, read_runs

RANKS = 4
SAVED, KILLED, LAST = 6, 9, 14
PAUSE_S = 1.0
CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # how finely the start of a process is known


@dataclass
class Seen:
    """The run, and what is known of it from elsewhere.

    Args:
        folder: Its files.
        run: What they tell.
        results: What the ranks of the second attempt returned.
        moments: Of each rank the Unix times at which its first attempt began, its second began, committed its last
            update, and ended.
        launches: Unix times just before the processes of either attempt were started.
    """

    folder: Path
    run: Run
    results: list[dict[str, Any]]
    moments: list[list[float]]
    launches: list[float]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("goodput")
    first = {"updates": LAST, "save": SAVED, "die": KILLED}
    launches = [time.time()]
    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(_kill_all, [folder / f"waits-{rank}" for rank in range(RANKS)])
        killed = run_ranks(jobs_goodput.attempt_with, RANKS, folder, ["backward@2:3", "vote@4:1:exception"], first)
        killing.result()
    assert {result.exit_code for result in killed} == {-signal.SIGKILL}, "\n".join(result.error for result in killed)
    time.sleep(PAUSE_S)
    launches.append(time.time())
    second = {"updates": LAST, "resume": True}
    # Frontiers count from the checkpoint
    results = values(run_ranks(jobs_goodput.attempt_with, RANKS, folder, [f"forward@{11 - SAVED}:0"], second))
    (run,) = read_runs([folder / "log"])
    texts = [(folder / f"moments-{rank}.txt").read_text() for rank in range(RANKS)]
    moments = [list(map(float, text.split())) for text in texts]
    return Seen(folder=folder, run=run, results=results, moments=moments, launches=launches)


def _kill_all(waits: list[Path]) -> None:
    """End the processes that wait for it at one moment: whoever saw a peer die first would fail-stop, an incident more."""
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in waits):
        assert time.monotonic() < deadline, "not all ranks have come to their end"
        time.sleep(0.01)
    processes = [int(path.read_text()) for path in waits]
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    while not all(" T " in Path(f"/proc/{process}/stat").read_text() for process in processes):
        assert time.monotonic() < deadline, "not all ranks have stopped"
        time.sleep(0.001)
    for process in processes:
        os.kill(process, signal.SIGKILL)


def test_every_second_of_every_rank_is_in_one_class(seen: Seen) -> None:
    assert [rank.rank for rank in seen.run.ranks] == list(range(RANKS))
    for rank, (began, _, committed, ended) in zip(seen.run.ranks, seen.moments, strict=True):
        spent = sum(rank.totals.values())
        assert spent == pytest.approx(rank.elapsed, rel=1e-3)
        # From the start of the process, which is before its work, until between its last update and the end of its work
        assert committed - began < spent < ended - seen.launches[0] + CLOCK_TICK_S
        print(f"rank {rank.rank}: classes {spent:.4f} s, wall clock {rank.elapsed:.4f} s, work {ended - began:.4f} s")
    summary = seen.run.summary()
    assert sum(summary.totals.values()) == pytest.approx(sum(rank.elapsed for rank in seen.run.ranks), rel=1e-3)


def test_the_restart_is_one_attempt_more(seen: Seen) -> None:
    summary = seen.run.summary()
    assert (summary.ranks, summary.attempts, summary.updates) == (RANKS, 2, LAST)
    assert [one["updates"] for one in seen.results] == [LAST] * RANKS
    for rank in seen.run.ranks:
        first, second = rank.attempts
        assert (first.completed, second.completed) == (False, True)
        assert (first.step, second.step) == (0, SAVED)
        ((gap_began, gap_ended),) = rank.gaps
        assert gap_ended - gap_began == pytest.approx(rank.totals[TimeClass.INFRASTRUCTURE_RECOVERY])
        assert gap_ended - gap_began > PAUSE_S
        assert seen.launches[1] - CLOCK_TICK_S <= second.start <= seen.moments[rank.rank][1]


def test_what_was_committed_before_counts_as_replayed(seen: Seen) -> None:
    step_s = 2 * jobs_goodput.STEP_S
    for rank in seen.run.ranks:
        # The last total of the killed attempt may be a second old, but no more
        replays = rank.attempts[0].reached - SAVED
        assert 0 <= KILLED - replays - SAVED <= 1 / step_s
        assert rank.totals[TimeClass.REPLAYED_UPDATES] >= replays * step_s
        assert rank.totals[TimeClass.PRODUCTIVE] >= (LAST - 1 / step_s) * step_s


def test_three_incidents(seen: Seen) -> None:
    incidents = seen.run.summary().incidents
    assert [(one.frontier, one.outcome) for one in incidents] == [(2, "recovered"), (4, "recovered"), (11, "recovered")]
    # A lost vote is rolled forward if all stand at theirs by then; else the update runs again
    assert [one.action == "redo" or (one.frontier, one.action) == (4, "roll_forward") for one in incidents] == [True] * 3
    assert [one.checkpoint for one in incidents] == [None, None, SAVED]
    for cls in (TimeClass.GROUP_REPAIR, TimeClass.REDONE_WORK, TimeClass.GUARD, TimeClass.CHECKPOINT_SAVE,
                TimeClass.CHECKPOINT_RESTORE, TimeClass.PROGRAM_STARTUP):  # fmt: skip
        assert seen.run.summary().totals[cls] > 0, cls


def test_the_report_tells_the_same(seen: Seen, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--json", str(seen.folder / "log")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["elapsed_s"] == pytest.approx(sum(told["totals"].values()), rel=1e-9)
    assert (told["run"], told["attempts"], len(told["incidents"])) == ("log", 2, 3)
    assert main(["report", str(seen.folder / "log")]) == 0
    assert f"{LAST} updates committed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("dark", "colours"),
    # The page, productive time, restarts, start-up
    [(False, ("#f6f7f9", "#2a9d6f", "#b2326b", "#8b95a5")), (True, ("#12161c", "#37b583", "#d0508a", "#76818f"))],
)
def test_the_page_shows_the_run(seen: Seen, tmp_path: Path, dark: bool, colours: tuple[str, ...]) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(seen.folder / "log"), "--html", str(page), "--json"]) == 0
    picture = screenshot(page, tmp_path / "report.png", width=1100, height=1300, dark=dark)
    for colour in colours:
        assert count(picture, colour) > 5000, colour
    # A redo, a roll-forward and a redo on each rank's line, and three rows
    text = page.read_text()
    assert text.count('class="fault"') == 3 * RANKS
    assert text.count('<td class="good">recovered</td>') == 3


def test_the_node_exporters_files_hold_the_last_attempt(seen: Seen) -> None:
    for rank in seen.run.ranks:
        text = (seen.folder / "metrics" / f"accelpact-rank{rank.rank}.prom").read_text()
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
        seconds = {one.labels["class"]: one.value for one in samples if one.name == "accelpact_time_seconds_total"}
        assert sum(seconds.values()) == pytest.approx(sum(rank.attempts[-1].totals.values()), rel=1e-3)
        (updates,) = [one.value for one in samples if one.name == "accelpact_committed_updates"]
        assert updates == LAST

"""A rank's process is killed or stopped: its peers end soon, together. One that is only slow is waited for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jobs_lost
import pytest
from cluster import run_ranks, values

from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE

HEARTBEAT_DEADLINE = 3.0
OPTIONS = {"updates": 6, "accumulate": 1, "heartbeat_deadline": HEARTBEAT_DEADLINE}


def seconds_until_the_end(folder: Path, ranks: list[int]) -> float:
    """From the moment it happened until the last of these ranks ended."""
    struck = float((folder / "struck").read_text())
    return max(float((folder / f"ended{rank}").read_text()) for rank in ranks) - struck


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_process_is_noticed_at_once(victim: int, tmp_path: Path) -> None:
    results = run_ranks(jobs_lost.fit, 4, str(tmp_path), "kill", victim, OPTIONS, timeout=60)
    peers = [rank for rank in range(4) if rank != victim]
    assert results[victim].exit_code == -9
    for rank in peers:
        assert results[rank].exit_code == FAIL_STOP_EXIT_CODE, results[rank].output
        assert f"rank {victim} stopped: its process" in results[rank].output
        assert "has ended without a farewell" in results[rank].output
    assert seconds_until_the_end(tmp_path, peers) < HEARTBEAT_DEADLINE  # it takes no deadline


@pytest.mark.parametrize("victim", [0, 2])
def test_a_stopped_process_is_given_up_after_the_deadline(victim: int, tmp_path: Path) -> None:
    """Also rank 0's, which serves the control store: then nobody gets an answer."""
    results = run_ranks(jobs_lost.fit, 4, str(tmp_path), "stop", victim, OPTIONS, timeout=60)
    peers = [rank for rank in range(4) if rank != victim]
    assert results[victim].exit_code == -9  # it must not wake up later and go on by itself
    for rank in peers:
        assert results[rank].exit_code == FAIL_STOP_EXIT_CODE, results[rank].output
    if victim:
        assert all(f"was stopped for {HEARTBEAT_DEADLINE:g} s" in results[rank].output for rank in peers)
    assert seconds_until_the_end(tmp_path, peers) < 2 * HEARTBEAT_DEADLINE


def test_rank_0_serves_the_store_and_takes_it_along(tmp_path: Path) -> None:
    results = run_ranks(jobs_lost.fit, 4, str(tmp_path), "kill", 0, OPTIONS, timeout=60)
    for rank in (1, 2, 3):
        assert results[rank].exit_code == FAIL_STOP_EXIT_CODE, results[rank].output
    assert seconds_until_the_end(tmp_path, [1, 2, 3]) < HEARTBEAT_DEADLINE


@pytest.mark.parametrize("what", ["hold", "slow", "freeze"])
def test_a_slow_rank_is_waited_for(what: str, tmp_path: Path, reference: Any) -> None:
    results = values(run_ranks(jobs_lost.fit, 4, str(tmp_path), what, 2, OPTIONS, timeout=90))
    for result, wanted in zip(results, reference(**OPTIONS), strict=True):
        assert result["digest"] == wanted["digest"]
        assert result["incidents"] == []


def test_nobody_is_left_behind(tmp_path: Path) -> None:
    """A sentinel ends with its rank."""
    values(run_ranks(jobs_lost.fit, 4, str(tmp_path), "nothing", 0, OPTIONS, timeout=60))
    sentinels = [int(pid) for file in tmp_path.glob("children*") for pid in file.read_text().split()]
    assert len(sentinels) == 4
    assert [pid for pid in sentinels if Path(f"/proc/{pid}").exists()] == []


def test_nobody_is_left_behind_by_a_lost_rank(tmp_path: Path) -> None:
    run_ranks(jobs_lost.fit, 4, str(tmp_path), "kill", 3, OPTIONS, timeout=60)
    sentinels = [int(pid) for file in tmp_path.glob("children*") for pid in file.read_text().split()]
    assert len(sentinels) == 4
    deadline = time.monotonic() + 10
    while any(map(_runs, sentinels)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [pid for pid in sentinels if _runs(pid)] == []


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

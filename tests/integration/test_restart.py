"""A run that is stopped or killed goes on in new processes, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import restarted
from cluster import RankResult, free_port, run_ranks, values

from lightning_accelpact.cli import main
from lightning_accelpact.goodput import TimeClass
from lightning_accelpact.goodput.run import read_runs
from lightning_accelpact.journal import Journal

TESTS = Path(__file__).parents[1]
RELAUNCHED = {"TORCHELASTIC_RUN_ID": "a-job", "TORCHELASTIC_RESTART_COUNT": "1"}


def attempt(folder: Path, ends: str = "-", env: dict[str, str] | None = None, **options: Any) -> list[RankResult]:
    """One attempt by four warm ranks, as a supervisor's first one unless told otherwise."""
    folder.mkdir(exist_ok=True)
    first = {"TORCHELASTIC_RUN_ID": "a-job", "TORCHELASTIC_RESTART_COUNT": "0"}
    return run_ranks(restarted.fit_with, 4, folder, ends, options, env=first if env is None else env, timeout=90)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """The run without an end before its time, with some options."""
    known: dict[str, list[dict[str, Any]]] = {}

    def run(**options: Any) -> list[dict[str, Any]]:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = values(attempt(tmp_path_factory.mktemp("undisturbed"), resume="never", **options))
        return known[key]

    return run


def assert_the_same(results: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """After every update that is in both, each rank held the same weights, buffers, optimizer state and metric."""
    for rank, (result, expected) in enumerate(zip(results, wanted, strict=True)):
        assert result["seen"], rank
        for update, seen in result["seen"].items():
            assert seen == {str(number): one for number, one in expected["seen"].items()}[str(update)], (rank, update)


# -- under a real launcher


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[subprocess.CompletedProcess[str]]]:
    """torchrun relaunches twice, and when it has given up the same command is run again.

    The first attempt fail-stops 3 updates after the checkpoint, in the second a rank is killed after 6, in the third
    rank 0 after 12. torchrun's defaults: with Gloo they let a plain job read a dead store's addresses.
    """
    folder = tmp_path_factory.mktemp("launched")
    set_by_launchers = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
    environment = {name: value for name, value in os.environ.items() if name not in set_by_launchers}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH", "")])
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4", "--max-restarts=2",
        f"--master-port={free_port()}", str(TESTS / "restarted.py"), str(folder), "stop@16", "kill@19:1", "kill@25:0", "-",
    ]  # fmt: skip
    return folder, [
        subprocess.run(command, env=environment, check=False, capture_output=True, text=True, timeout=240)
        for _ in range(2)
    ]


def attempts_of(folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank has written about its attempts; one that was killed has not written about that one."""
    return [[json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()] for rank in range(4)]


def test_torchrun_and_a_rerun_go_on_from_the_checkpoint(launched: Any, undisturbed: Any) -> None:
    folder, (relaunched, rerun) = launched
    assert relaunched.returncode != 0
    assert rerun.returncode == 0, rerun.stdout + rerun.stderr
    wanted = undisturbed()
    attempts = [(0, 16), (13, 19), (13, 25), (13, restarted.UPDATES)]
    seen = set()
    for rank, results in enumerate(attempts_of(folder)):
        places = [(one["first"], one["step"]) for one in results]
        # torchrun may have killed it before it had written what it saw, but not at the end
        assert places == [place for place in attempts if place in places]
        assert places[-1] == attempts[-1]
        seen.update(places)
        for one in results:
            assert_the_same([one], [wanted[rank]])
    assert seen == set(attempts)
    said = relaunched.stderr
    for line in ("the job has been relaunched 1 times", "the job has been relaunched 2 times"):
        assert line in said
    assert said.count("resuming from") == 2
    assert "it ended with: fail_stop" in rerun.stderr


def test_the_replay_is_in_the_summary_and_in_the_report(launched: Any, capsys: pytest.CaptureFixture[str]) -> None:
    folder, (_, rerun) = launched
    assert "28 updates committed" in rerun.stdout
    assert "4 attempts" in rerun.stdout
    assert f"3 restarts from a checkpoint: {3 + 6 + 12} updates replayed" in rerun.stdout
    (run,) = [record.run for record in Journal(folder).runs()]
    assert main(["report", str(Journal(folder).run_folder(run))]) == 0
    assert f"3 restarts from a checkpoint: {3 + 6 + 12} updates replayed" in capsys.readouterr().out
    (read,) = read_runs([Journal(folder).run_folder(run)])
    assert all(rank.totals[TimeClass.REPLAYED_UPDATES] > 0 for rank in read.ranks)
    (end,) = {rank[-1]["summary"]["replayed"] for rank in attempts_of(folder)}
    assert end == read.summary().replayed == 3 + 6 + 12
    assert [one.checkpoint_age for one in read.summary().incidents] == [3, 6, 12]


def test_every_rank_leaves_one_record(launched: Any) -> None:
    folder, _ = launched
    journal = Journal(folder)
    (run,) = journal.runs()
    assert (run.attempts, run.completed) == (4, True)
    records = sorted(journal.run_folder(run.run).glob("end-*.json"))
    by_attempt = [[json.loads(path.read_text()) for path in records if f"attempt{n}" in path.name] for n in range(4)]
    assert [[one["rank"] for one in attempt] for attempt in by_attempt] == [[0, 1, 2, 3], [0, 2, 3], [1, 2, 3], []]
    for attempt, (reached, age) in zip(by_attempt, [(16, 3), (19, 6), (25, 12)], strict=False):
        for one in attempt:
            assert (one["kind"], one["exit_code"], one["update"], one["world_size"]) == ("fail_stop", 86, reached, 4)
            assert one["checkpoint"]["path"].endswith("step=13.ckpt")
            assert (one["checkpoint"]["update"], one["checkpoint"]["replays"]) == (13, age)
            assert one["incident"]["outcome"] == "fail_stop"


# -- damaged checkpoints


def tear(path: Path) -> None:
    """As a process leaves it that is killed while it writes."""
    (path / "accelpact.json").unlink()
    (path / "__2_0.distcp").unlink()


def flip(path: Path) -> None:
    file = path / "__1_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def cut_off(path: Path) -> None:
    os.truncate(path / "accelpact-rank3.pt", 100)


def lose(path: Path) -> None:
    (path / "meta.pt").unlink(missing_ok=True)


DAMAGE = {
    tear: "was never completed",
    flip: "__1_0.distcp holds other bytes than were written",
    cut_off: "accelpact-rank3.pt has 100 bytes instead of",
    lose: "meta.pt is missing",
}


def test_damaged_checkpoints_are_passed_over(tmp_path: Path, undisturbed: Any) -> None:
    """The four newest are damaged, each in another way; then all."""
    for result in attempt(tmp_path, "stop@11", every=2):
        assert result.exit_code == 86, result.output + result.error
    saved = {update: tmp_path / "checkpoints" / f"step={update}.ckpt" for update in (2, 4, 6, 8, 10)}
    for damage, update in zip(DAMAGE, (10, 8, 6, 4), strict=True):
        damage(saved[update])
    results = attempt(tmp_path, "stop@3", env=RELAUNCHED, every=2)  # counted from the checkpoint
    for (damage, said), update in zip(DAMAGE.items(), (10, 8, 6, 4), strict=True):
        assert f"passing over checkpoint {saved[update]}" in results[0].output, damage
        assert said in results[0].output, damage
    assert f"resuming from {saved[2]} at update 2" in results[0].output
    for path in (tmp_path / "checkpoints").iterdir():
        lose(path)
    last = attempt(tmp_path, env={**RELAUNCHED, "TORCHELASTIC_RESTART_COUNT": "2"}, updates=6, every=100)
    assert "there is no complete checkpoint to go on from: starting again from the first update" in last[0].output
    assert_the_same(values(last), undisturbed())


def test_a_rank_that_is_killed_while_it_writes_leaves_the_previous_one(tmp_path: Path, undisturbed: Any) -> None:
    """``last.ckpt`` is written over each time."""
    options = {"every": 2, "checkpoint_options": {"save_top_k": 1, "filename": "only", "enable_version_counter": False}}
    results = attempt(tmp_path, "write@4:2", **options)
    assert results[2].exit_code == -9
    (folder,) = [path for path in (tmp_path / "checkpoints").iterdir() if path.name.endswith(".writing")]
    assert not (folder / "accelpact.json").exists()
    slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    again = attempt(tmp_path, env={**RELAUNCHED, **slurm}, updates=6, **options)
    assert "only.ckpt.writing: it was never completed" in again[0].output
    assert "only.ckpt at update 2" in again[0].output
    assert_the_same(values(again), undisturbed())

"""What a run may repair is what the envelope in force qualifies: qualified, run, and run again without it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
from cluster import RankResult, run_ranks, values

from lightning_accelpact.cli import main
from lightning_accelpact.qualification import probes
from lightning_accelpact.recovery.action import Action, Phase
from lightning_accelpact.recovery.envelope import Entry, Envelope
from lightning_accelpact.recovery.fault import Fault, FaultPoint
from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE

BACKWARD = [Fault(point=FaultPoint.BACKWARD, update=1, rank=1)]
BOUNDARY = [Fault(point=FaultPoint.BOUNDARY, update=1, rank=0)]
PROBES = ["rebuild", "again", "watchdog", "preserve", "retry", "redo", "rebind"]


def fit(envelope: Path | str, faults: list[Fault] = BACKWARD, **options: Any) -> list[RankResult]:
    return run_ranks(jobs.fit_with, 2, {"faults": faults, "updates": 3, "envelope": envelope, **options})


def actions(results: list[RankResult]) -> set[str]:
    return {incident["action"] for value in values(results) for incident in value["incidents"]}


def stopped(results: list[RankResult]) -> str:
    """What rank 0 says of the fail-stop, which must be one on every rank."""
    assert [result.exit_code for result in results] == [FAIL_STOP_EXIT_CODE] * 2, results
    return results[0].output


@pytest.fixture(scope="module")
def qualified(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``accelpact qualify --json`` finds out about this machine, as a user runs it."""
    file = tmp_path_factory.mktemp("envelope") / "envelope.json"
    command = [sys.executable, "-m", "lightning_accelpact.cli", "qualify", "--json", "--trials", "2"]
    done = subprocess.run(
        [*command, "--framework", "lightning.pytorch", "--output", str(file)], check=False, capture_output=True, text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["file"] == str(file) and said["entries"] == json.loads(file.read_text())["entries"]
    return file


def test_every_probe_has_its_trials_and_successes(qualified: Path) -> None:
    (entry,) = Envelope.load(qualified).entries
    assert [probe.name for probe in entry.probes] == PROBES
    assert all(probe.passed for probe in entry.probes), entry.probes
    trials = {probe.name: probe.trials for probe in entry.probes}
    # Eight repairs of the model in each round of trials, on four ranks
    assert trials == {**dict.fromkeys(PROBES, 2), "watchdog": 1, "rebind": 2 * 8 * 4}
    assert {phase.value: [action.value for action in names] for phase, names in entry.actions.items()} == {
        "committed": ["preserve", "retry"],
        "forward": ["retry", "redo"],
        "backward": ["retry", "redo"],
        "prepared": ["roll_forward", "retry", "redo"],
    }


def test_a_run_with_that_envelope_recovers(qualified: Path) -> None:
    assert actions(fit(qualified)) == {"retry"}


def test_without_a_retry_the_next_qualified_action_is_taken(qualified: Path, tmp_path: Path) -> None:
    (entry,) = Envelope.load(qualified).entries
    fewer = {phase: tuple(set(names) - {Action.RETRY}) for phase, names in entry.actions.items()}
    Envelope([replace(entry, actions=fewer)]).save(tmp_path / "fewer.json")
    assert actions(fit(tmp_path / "fewer.json")) == {"redo"}


@pytest.mark.parametrize("faults", [BACKWARD, BOUNDARY], ids=["inside", "between"])
def test_with_an_empty_envelope_the_same_fault_fail_stops_and_says_why(faults: list[Fault], tmp_path: Path) -> None:
    Envelope().save(tmp_path / "empty.json")
    said = stopped(fit(tmp_path / "empty.json", faults))
    assert "is not qualified on this stack: nothing has been measured on this stack (torch" in said
    assert "`accelpact qualify` finds out what this stack can do" in said


def test_with_an_entry_of_another_torch_the_same_fault_fail_stops_and_says_why(qualified: Path, tmp_path: Path) -> None:
    (entry,) = Envelope.load(qualified).entries
    Envelope([replace(entry, stack=replace(entry.stack, torch="2.12.1"))]).save(tmp_path / "old.json")
    said = stopped(fit(tmp_path / "old.json"))
    assert "was made on torch 2.12.1, and this is 2." in said
    assert "no fault will be repaired in this run, each ends it" in said  # at the start, once


def test_without_a_fault_nobody_needs_an_envelope(tmp_path: Path) -> None:
    Envelope().save(tmp_path / "empty.json")
    assert [value["updates"] for value in values(fit(tmp_path / "empty.json", []))] == [3, 3]


def test_a_file_that_is_not_there_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for result in fit(tmp_path / "nothing.json"):
        assert "nothing.json cannot be read" in result.error and 'envelope= is "auto", "off" or the path' in result.error


def test_auto_measures_once(tmp_path: Path) -> None:
    home = {"XDG_CACHE_HOME": str(tmp_path)}
    first, second = (
        run_ranks(jobs.fit_with, 2, {"faults": BACKWARD, "updates": 3}, env=home) for _ in range(2)
    )
    assert actions(first) == actions(second) == {"retry"}
    assert "this stack is new here" in first[0].output
    assert "this stack is new here" not in first[1].output + second[0].output
    (file,) = (tmp_path / "accelpact").iterdir()
    (entry,) = Envelope.load(file).entries
    assert {probe.trials for probe in entry.probes if probe.name != "rebind"} == {1}


def test_under_torchrun_all_its_processes_take_part(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "lightning_accelpact.cli", "qualify", "--json", "--trials", "1", "--framework", "lightning.fabric",
         "--output", str(tmp_path / "envelope.json")],
        check=False, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (said,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))  # rank 0 alone says it
    (entry,) = Envelope.load(tmp_path / "envelope.json").entries
    assert said["entries"] == json.loads((tmp_path / "envelope.json").read_text())["entries"]
    assert entry.stack.framework.startswith("lightning.fabric ")
    # Two replicas of one shard: no collective in a forward pass that could run again
    assert not entry.failure
    assert Action.PRESERVE in entry.actions[Phase.COMMITTED] and Action.REDO in entry.actions[Phase.FORWARD]
    assert entry.actions[Phase.BACKWARD] == (Action.RETRY, Action.REDO)


# -- a platform that kills or hangs what touches it


def _killed(target: probes.Target) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError("still here")


def _hangs(target: probes.Target) -> dict[str, Any]:
    time.sleep(600)
    raise AssertionError("still here")


def qualify(monkeypatch: pytest.MonkeyPatch, file: Path, *options: str, **broken: Any) -> Entry:
    """As the command does it, from this process, with some probes replaced."""
    for name, probe in broken.items():
        monkeypatch.setitem(probes.PROBES, name, probe)
    words = ["qualify", "--framework", "lightning.pytorch", "--trials", "1", "--deadline", "20", "--output", str(file)]
    assert main([*words, *options]) == 0
    (entry,) = Envelope.load(file).entries
    return entry


def test_a_platform_that_kills_the_process_is_not_qualified_and_trains_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "envelope.json"
    entry = qualify(monkeypatch, file, rebuild=_killed)
    assert entry.actions == {}
    assert (entry.probes[0].trials, entry.probes[0].successes) == (1, 0)
    assert entry.probes[0].detail == "rank 0: process killed by SIGSEGV"
    assert "nothing: rebuild: 0 of 1, rank 0: process killed" in " ".join(capsys.readouterr().out.split())
    assert [value["updates"] for value in values(fit(file, []))] == [3, 3]
    assert "rebuild: 0 of 1, rank 0: process killed by SIGSEGV" in stopped(fit(file))


def _fine(target: probes.Target) -> dict[str, Any]:
    """A probe that goes well, in no time, so that the deadline can be short."""
    clean = {"references": 1, "stale_references": 0}
    verbs = {"committed": "preserve", "forward": "retry", "backward": "retry", "prepared": "roll_forward"}
    repairs = [{"phase": phase, "verb": verb, **clean} for phase, verb in verbs.items()]
    return {"seconds": 0.1, "seen": "nothing", "repairs": repairs}


def test_a_probe_that_hangs_costs_its_action(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    others = dict.fromkeys(("rebuild", "again", "watchdog", "preserve", "retry"), _fine)
    entry = qualify(monkeypatch, tmp_path / "envelope.json", "--json", "--deadline", "5", redo=_hangs, **others)
    details = {probe.name: (probe.successes, probe.detail) for probe in entry.probes}
    assert details["redo"] == (0, "rank 0: hung: still there at the deadline, and killed then")
    assert details["retry"] == (1, "nothing")
    assert entry.actions == {
        Phase.COMMITTED: (Action.PRESERVE, Action.RETRY),
        Phase.FORWARD: (Action.RETRY,),
        Phase.BACKWARD: (Action.RETRY,),
        Phase.PREPARED: (Action.ROLL_FORWARD, Action.RETRY),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--trials", "0"], "--trials 0 must be at least 1"), (["--deadline", "-1"], "--deadline -1.0 must be"), ([], "cannot be read")],
)
def test_what_makes_no_sense_is_refused(
    options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "envelope.json").write_text("{")
    assert main(["qualify", "--output", str(tmp_path / "envelope.json"), *options]) == 1
    assert words in capsys.readouterr().err

"""Fabric's twin of the strategy: a sample of the fault matrix in loops of the user's own, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs_fabric
import pytest
from cluster import RankResult, free_port, run_ranks, values

from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint

NEVER_EQUAL = ("incidents", "pending", "folder", "hint")

PLACES: dict[str, dict[str, Any]] = {
    "before-first-forward": {"point": FaultPoint.START, "update": 0},
    "first-forward": {"point": FaultPoint.FORWARD, "update": 2, "micro_batch": 0},
    "last-forward": {"point": FaultPoint.FORWARD, "update": 2},
    "first-backward": {"point": FaultPoint.BACKWARD, "update": 2, "micro_batch": 0},
    "last-backward": {"point": FaultPoint.BACKWARD, "update": 2},
    "last-all-reduce": {"point": FaultPoint.ALL_REDUCE, "update": 2},
    "vote": {"point": FaultPoint.VOTE, "update": 2},
    "step": {"point": FaultPoint.STEP, "update": 2},
    "boundary": {"point": FaultPoint.BOUNDARY, "update": 2},
    "last-boundary": {"point": FaultPoint.BOUNDARY, "update": 5},
}

_references: dict[str, list[dict[str, Any]]] = {}


def check(
    job: Callable[..., Any], faults: list[Fault], *, reuse: bool = False, **options: Any
) -> list[dict[str, Any]]:
    """Run a job with the faults and compare all that it says, on every rank, with what it says without them."""
    key = f"{job.__name__} {sorted(options.items())}"
    if key not in _references:
        _references[key] = results_of(job, **options)
    results = results_of(job, faults, reuse=reuse, **options)
    compare(results, _references[key])
    assert not any(result["pending"] for result in results)
    return results


def compare(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for rank, (result, wanted) in enumerate(zip(results, expected, strict=True)):
        assert not wanted["incidents"]
        for key in set(wanted) - set(NEVER_EQUAL):
            assert result[key] == wanted[key], f"rank {rank}: {key} differs"
        assert result["incidents"]
        assert all(incident["outcome"] == "recovered" for incident in result["incidents"])
        assert all(incident["stale_references"] == 0 < incident["references"] for incident in result["incidents"])


def results_of(job: Callable[..., Any], *args: Any, reuse: bool = False, **options: Any) -> list[dict[str, Any]]:
    """What a job says on each of four ranks."""
    return values(run_ranks(jobs_fabric.call, 4, job.__name__, args, options, reuse=reuse))


# -- one fault in an update


# After the last update no collective follows that could fail
CELLS = [(place, kind) for place in PLACES for kind in FaultKind if (place, kind) != ("last-boundary", FaultKind.COLLECTIVE)]


@pytest.mark.parametrize(("place", "kind"), CELLS, ids=lambda value: getattr(value, "value", value))
def test_one_fault_changes_nothing(place: str, kind: FaultKind) -> None:
    fault = Fault(kind=kind, rank=3, **PLACES[place])
    check(jobs_fabric.train, [fault], reuse=place != "last-boundary")  # the next run would meet what it leaves broken


@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION, FaultKind.SOCKETS], ids=lambda kind: kind.value)
def test_a_fault_of_rank_0_in_every_update(kind: FaultKind) -> None:
    places = ["first-forward", "last-backward", "last-all-reduce", "vote", "step"]
    faults = [Fault(kind=kind, rank=0, **{**PLACES[place], "update": at}) for at, place in enumerate(places)]
    for result in check(jobs_fabric.train, faults):
        assert len(result["incidents"]) == len(faults)


@pytest.mark.parametrize("victim", [0, 3])
def test_a_fault_during_a_repair_starts_it_again(victim: int) -> None:
    faults = [
        Fault(point=FaultPoint.BACKWARD, update=2, rank=1),
        Fault(point=FaultPoint.REPAIR, update=2, rank=victim, kind=FaultKind.EXCEPTION),
    ]
    results = check(jobs_fabric.train, faults)
    assert max(incident["attempts"] for result in results for incident in result["incidents"]) > 1


def test_the_incident_says_what_was_redone() -> None:
    fault = Fault(kind=FaultKind.EXCEPTION, rank=3, **PLACES["last-backward"])
    incident = check(jobs_fabric.train, [fault])[3]["incidents"][0]
    assert (incident["phase"], incident["action"], incident["redone_micro_batches"]) == ("backward", "redo", 2)
    assert incident["redo_s"] > 0


# -- other loops

BACKWARD = Fault(point=FaultPoint.BACKWARD, update=2, rank=3)
VOTE = Fault(point=FaultPoint.VOTE, update=1, rank=0, kind=FaultKind.EXCEPTION)
STEP = Fault(point=FaultPoint.STEP, update=4, rank=1)


OTHER_WAYS: dict[str, dict[str, Any]] = {
    "jointly": {"jointly": True},
    "closure": {"closure": True},
    "sharded-by-hand": {"sharded": True},
    "compiled-blocks": {"compiled": "blocks"},
    "compiled-whole": {"compiled": "whole"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_other_ways_to_write_it(way: str) -> None:
    check(jobs_fabric.train, [BACKWARD, VOTE, STEP], **OTHER_WAYS[way])


def test_module_and_optimizer_may_be_set_up_in_one_call() -> None:
    one, two = (results_of(jobs_fabric.train, jointly=way) for way in (False, True))
    assert [result["digest"] for result in one] == [result["digest"] for result in two]


@pytest.mark.parametrize("job", [jobs_fabric.two_optimizers, jobs_fabric.adversarial], ids=lambda job: job.__name__)
def test_several_optimizers(job: Callable[..., Any]) -> None:
    for result in check(job, [BACKWARD, VOTE, STEP]):
        assert all(result.get("trains", [True]))


def test_a_skipped_update_meets_a_fault() -> None:
    skipped = Fault(point=FaultPoint.VOTE, update=3, rank=3)
    for result in check(jobs_fabric.two_optimizers, [skipped]):
        assert result["updates"] == 5


def test_what_is_tracked_is_set_back() -> None:
    for result in check(jobs_fabric.outside_the_module, [BACKWARD, VOTE]):
        assert result["seen"] == [0, 1] * 4


# -- outside an update


@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION, FaultKind.SOCKETS], ids=lambda kind: kind.value)
@pytest.mark.parametrize("victim", [0, 3])
def test_a_fault_in_an_evaluation(victim: int, kind: FaultKind) -> None:
    fault = Fault(point=FaultPoint.BOUNDARY, update=2, rank=victim, kind=kind)
    compare(results_of(jobs_fabric.train, evaluation=fault), results_of(jobs_fabric.train))


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION, FaultKind.SOCKETS], ids=lambda kind: kind.value)
def test_a_fault_in_each_collective(kind: FaultKind, late: bool) -> None:
    fault = Fault(point=FaultPoint.BOUNDARY, update=0, rank=3, kind=kind)
    results = results_of(jobs_fabric.collectives, fault, late=late)
    for result, wanted in zip(results, results_of(jobs_fabric.collectives), strict=True):
        assert result["values"] == wanted["values"]
        assert wanted["incidents"] == 0 < result["incidents"]


@pytest.mark.parametrize("one_file", [False, True], ids=["file-per-rank", "one-file"])
def test_a_fault_while_a_checkpoint_is_saved_or_loaded(one_file: bool, tmp_path: Path) -> None:
    save = Fault(point=FaultPoint.BOUNDARY, update=2, rank=3)
    load = Fault(point=FaultPoint.BOUNDARY, update=4, rank=0, kind=FaultKind.EXCEPTION)
    expected = results_of(jobs_fabric.checkpointed, str(tmp_path / "expected"), one_file=one_file)
    for late in (False, True):
        folder = str(tmp_path / str(late))
        results = results_of(jobs_fabric.checkpointed, folder, save, load, late=late, one_file=one_file)
        compare(results, expected)
        for result in results:
            assert len(result["incidents"]) == 2
            assert (result["update"], result["folder"]) == (2, folder)
            assert result["loaded"] not in (result["ended"], result["digest"])
            assert f"resume from {folder}/checkpoint (fabric.load), which replays 4 updates" == result["hint"]


# -- the account


def test_the_account_of_a_run(tmp_path: Path) -> None:
    fault = Fault(point=FaultPoint.BACKWARD, update=3, rank=1, kind=FaultKind.EXCEPTION)
    results = run_ranks(jobs_fabric.goodput, 2, str(tmp_path), [fault])
    summary, other = values(results)
    assert summary == other
    assert (summary["ranks"], summary["updates"], len(summary["incidents"])) == (2, 4, 1)
    incident = summary["incidents"][0]
    assert (incident["checkpoint"], incident["checkpoint_age"], incident["redone_micro_batches"]) == (2, 1, 2)
    spent = {name for name, seconds in summary["totals"].items() if seconds > 0}
    assert spent >= {"productive", "initialization", "data_loading", "checkpoint_save", "evaluation", "guard",
                     "group_repair", "redone_work"}  # fmt: skip
    assert [result.output.count("4 updates committed") for result in results] == [1, 0]
    lines = [json.loads(line) for line in (tmp_path / "goodput-rank1.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert [kind for kind in kinds if kind != "totals"] == ["start", "checkpoint", "incident", "summary"]
    assert (lines[-2]["ended"], lines[-2]["updates"]) == ("completed", 4)


# -- misuse, and the end

REFUSALS = {
    "step outside": "UpdateMisuse: optimizer.step() was called outside of an update, where it could not be run again:"
    " put the update into a function and call fabric.strategy.run_update(function), or pass"
    ' manual_optimization="fail_stop" to stop on a fault instead',
    "backward outside": "UpdateMisuse: fabric.backward() was called outside of an update",
    "no step": "UpdateMisuse: run_update(function) returned without an optimizer step, but left gradients",
    "backward after step": "UpdateMisuse: run_update(function): a forward pass after an optimizer step could not be"
    " run again. Steps come last",
    "LBFGS": "MisconfigurationException: accelpact_hsdp votes once before each step, but LBFGS evaluates",
    "stale optimizer": "MisconfigurationException: none of the parameters of AdamW belongs to a module that"
    " fabric.setup() has sharded: make it after model = fabric.setup(model)",
    "used optimizer": "MisconfigurationException: none of the parameters of AdamW belongs",
    "closure twice": "UpdateMisuse: ",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_misuse_is_refused(kind: str) -> None:
    for said in values(run_ranks(jobs_fabric.misuse, 2, kind)):
        assert said.startswith(REFUSALS[kind])


def test_a_backward_pass_of_torchs_own_is_refused() -> None:
    # Fabric says so with a RuntimeError, as communication does; so a rank that has already heard of it stops for that
    for result in run_ranks(jobs_fabric.misuse, 2, "plain backward"):
        assert result.exit_code in (0, 86)
        said = f"{result.value} {result.output}"
        assert "RuntimeError: The current strategy and precision selection requires you to call `fabric.backward" in said


@pytest.mark.parametrize("choice", ["refuse", "Update", None])
def test_another_choice_for_the_loop_is_refused(choice: Any) -> None:
    with pytest.raises(ValueError, match=r"manual_optimization=.* must be one of \['update', 'fail_stop'\]"):
        jobs_fabric.FabricHSDPStrategy(manual_optimization=choice)


def stopped(results: list[RankResult]) -> list[str]:
    """What the ranks of a run say that fail-stopped."""
    assert [result.exit_code for result in results] == [86] * len(results), [result.error for result in results]
    return [result.output for result in results]


def test_an_update_that_changed_its_batch_stops() -> None:
    fault = Fault(point=FaultPoint.BACKWARD, update=1, rank=1, kind=FaultKind.EXCEPTION)
    for output in stopped(run_ranks(jobs_fabric.changes_its_batch, 2, fault)):
        assert "wrote to a tensor of its batch in place" in output


def test_a_loop_as_it_is_survives_its_links_and_stops_on_an_exception() -> None:
    expected = values(run_ranks(jobs_fabric.as_it_is, 2))
    between = Fault(point=FaultPoint.VOTE, update=2, rank=1, kind=FaultKind.EXCEPTION)
    results = values(run_ranks(jobs_fabric.as_it_is, 2, [between]))
    compare(results, expected)
    for kind in (FaultKind.SOCKETS, FaultKind.COLLECTIVE):
        link = Fault(point=FaultPoint.BACKWARD, update=2, rank=1, kind=kind)
        compare(values(run_ranks(jobs_fabric.as_it_is, 2, [link])), expected)
    inside = Fault(point=FaultPoint.BACKWARD, update=2, rank=1, kind=FaultKind.EXCEPTION)
    outputs = stopped(run_ranks(jobs_fabric.as_it_is, 2, [inside]))
    assert 'a fault inside an update, with manual_optimization="fail_stop"' in outputs[1]


def test_an_error_on_one_rank_ends_the_run_on_all() -> None:
    results = run_ranks(jobs_fabric.error_on_one_rank, 4)
    assert [result.exit_code for result in results] == [86, 1, 86, 86]
    assert all("rank 1 stopped: ValueError: out of luck" in results[rank].output for rank in (0, 2, 3))


SCRIPT = """
import sys, torch
from lightning.fabric import Fabric
from lightning_accelpact import FabricHSDPStrategy, FaultPlan

faults = FaultPlan.parse(["boundary@2:1"]) if "boundary" in sys.argv else None
fabric = Fabric(accelerator="cpu", devices=2, strategy=FabricHSDPStrategy(shard=2, faults=faults))
fabric.launch()
model = fabric.setup(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)))
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters()))

def update():
    fabric.backward(model(torch.ones(1, 4)).sum())
    optimizer.step()

for _ in range(2):
    fabric.strategy.run_update(update)
if "error" in sys.argv and fabric.global_rank == 1:
    raise ValueError("out of luck")
if "forward" in sys.argv:
    if fabric.global_rank == 1:
        fabric.strategy.runtime.session.communicators.links.cut()
        if "unwound" in sys.argv:
            raise RuntimeError("Connection closed by peer")
    model(torch.ones(1, 4))
if "barrier" in sys.argv:
    fabric.barrier()
print("the script has ended")
"""


def run_script(path: Path, *arguments: str) -> list[subprocess.CompletedProcess[str]]:
    """Two ranks of a script of its own, as a launcher starts them."""
    path.write_text(SCRIPT)
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
              "NODE_RANK": "0", "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(path), *arguments], env={**common, "LOCAL_RANK": str(rank)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [rank.communicate(timeout=120) for rank in ranks]
    return [subprocess.CompletedProcess([], rank.returncode, *text) for rank, text in zip(ranks, said, strict=True)]


def test_a_script_that_does_not_finish_leaves_together_at_its_exit(tmp_path: Path) -> None:
    first, second = run_script(tmp_path / "script.py", "boundary")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout.index("the script has ended") < first.stdout.index("2 updates committed")
    assert "recovered" in first.stdout
    assert second.stdout == "the script has ended\n"


def test_an_error_that_nobody_catches_ends_the_run_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_script(tmp_path / "script.py", "error", "barrier")
    assert (first.returncode, second.returncode) == (86, 1), first.stderr + second.stderr
    assert "rank 1 stopped: ValueError: out of luck" in first.stderr
    assert "1 of 2 ranks" in first.stdout  # the summary is of what it knows itself
    assert second.stderr.count("ValueError: out of luck") == 1


def test_an_unprotected_forward_pass_survives_its_links(tmp_path: Path) -> None:
    first, second = run_script(tmp_path / "script.py", "forward")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert "the model is called outside of an update and of an evaluation step" in first.stderr
    assert "retry, repaired in" in first.stderr


def test_a_fault_that_unwinds_an_unprotected_forward_pass_stops(tmp_path: Path) -> None:
    first, second = run_script(tmp_path / "script.py", "forward", "unwound")
    assert (first.returncode, second.returncode) == (86, 86), first.stderr + second.stderr
    assert "a fault outside of run_update() and run()" in first.stderr + second.stderr

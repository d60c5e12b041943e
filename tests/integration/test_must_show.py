"""What the package promises beyond a bit-exact repair, each shown on four real ranks through the Trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jobs_must_show
import pytest
from cluster import RankResult, free_port, run_ranks, values

from lightning_accelpact.recovery.action import Action
from lightning_accelpact.recovery.fault import Fault
from lightning_accelpact.recovery.policy import FAIL_STOP_EXIT_CODE

TESTS = Path(__file__).parents[1]
BACKWARD = Fault.parse("backward@1:3")


def said(result: RankResult) -> str:
    """All that a rank has printed and raised."""
    return f"{result.output}\n{result.error}"


# -- the ablation


def test_without_rebinding_the_run_fails_on_the_retired_communicator() -> None:
    """The paper's ablation: the repair itself succeeds, and then FSDP2 uses the group that it still names."""
    for result in run_ranks(jobs_must_show.without_rebinding, 4, BACKWARD, 2):
        assert result.exit_code == 1, said(result)
        assert "all_gather" in result.error
        assert "ProcessGroup object at" in result.error
        assert "is not initialized in the world group map" in result.error


# -- the paper's own behaviour


def incidents_of(result: RankResult) -> list[dict[str, Any]]:
    """What the rank has printed before it ended."""
    (line,) = [line for line in result.output.splitlines() if line.startswith("INCIDENTS ")]
    return json.loads(line.removeprefix("INCIDENTS "))


def test_restart_fail_stops_every_rank_with_all_that_a_supervisor_needs(tmp_path: Path) -> None:
    checkpoint = tmp_path / "first.ckpt"
    fault = Fault.parse("backward@2:3")
    for rank, result in enumerate(run_ranks(jobs_must_show.restart, 4, fault, checkpoint)):
        assert result.exit_code == FAIL_STOP_EXIT_CODE == 86, said(result)
        (incident,) = incidents_of(result)
        assert (incident["outcome"], incident["action"], incident["frontier"]) == ("fail_stop", "restart", 2)
        assert incident["total_s"] > 0
        message = result.error.splitlines()[-1]
        assert f"fail-stop on rank {rank} in phase {incident['phase']} at frontier 2: redo is needed" in message
        assert f"resume from {checkpoint} (ckpt_path), which replays 1 updates (exit code 86)" in message
        detected, stopped = incident["detect_s"] * 1e3, incident["total_s"] * 1e3
        print(f"rank {rank}: detected after {detected:.1f} ms, stopped {stopped:.1f} ms later")


def test_restart_without_a_checkpoint_says_so() -> None:
    for result in run_ranks(jobs_must_show.restart, 4, BACKWARD, None):
        assert result.exit_code == FAIL_STOP_EXIT_CODE, said(result)
        assert "this run has written no checkpoint" in result.error.splitlines()[-1]


def test_restart_still_rolls_forward_what_only_lacks_its_vote() -> None:
    for incidents in values(run_ranks(jobs_must_show.restart, 4, Fault.parse("vote@1:3:exception"), None)):
        assert [(one["outcome"], one["action"]) for one in incidents] == [("recovered", Action.ROLL_FORWARD.value)]


# -- the census


def test_a_repair_leaves_no_reference_to_a_retired_communicator() -> None:
    """32 layers and the root: counted by the repair itself, and by a walk over all that the trainer reaches."""
    layers = 32
    for rank, found in enumerate(values(run_ranks(jobs_must_show.census, 4, BACKWARD, layers))):
        # For each layer and the root its sharding and its replication group, and both in the mesh's registry
        references = 2 * (layers + 1) + 2
        incident = found["incident"]
        assert (incident["references"], incident["stale_references"]) == (references, 0)
        before, after = found["before"], found["after"]
        assert before["retired"] >= references  # the walk finds all that the repair will find
        assert after["retired"] == 0
        assert after["current"] == before["current"]
        assert found["alive"] == 0  # nor does anything that the walk does not come to
        print(f"rank {rank}: {references} references rebound in {incident['rebind_s'] * 1e3:.2f} ms,"
              f" {after['walked']} named objects walked over")  # fmt: skip


# -- bad input


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[str, str, bool]]:
    """One rank of four, alone: whatever would wait for the others would never end."""
    (found,) = values(run_ranks(jobs_must_show.refusals, 1, env={"WORLD_SIZE": "4"}))
    return found


REFUSED: dict[str, tuple[str, list[str]]] = {
    "sizes that do not multiply": ("ValueError", ["replicate=3 x shard=2 makes 6", "choose one of 1 x 4, 2 x 2"]),
    "one process only": ("ValueError", ["at least 2 processes", "got 1"]),
    "unknown option": ("TypeError", ["unexpected keyword argument 'replicas'"]),
    "CUDA that is absent": ("MisconfigurationException", ["CUDAAccelerator", "not available", "['cpu']"]),
    "NCCL without CUDA": ("ValueError", ['process_group_backend="nccl"', "needs CUDA devices", "on cpu"]),
    "collectives longer than the budget": ("ValueError", ["collective_timeout=200 s must be shorter than"]),
    "rebuilds longer than collectives": ("ValueError", ["rebuild_timeout=60 s must be shorter than"]),
    "unknown interface": ("ValueError", ["control_interface='nowhere0'", "'lo'"]),
    "victim that does not exist": ("ValueError", ["names rank 7", "0 to 3"]),
    "what to wrap": ("ValueError", ["wrap='blocks'", '"auto" or a set of']),
    "what to do": ("ValueError", ["uncommitted='maybe'", "['retry', 'redo', 'restart']"]),
}  # fmt: skip


@pytest.mark.parametrize("case", jobs_must_show.BAD_INPUT)
def test_bad_input_is_refused_before_anything_starts(case: str, refusals: dict[str, tuple[str, str, bool]]) -> None:
    kind, message, started = refusals[case]
    wanted, parts = REFUSED[case]
    assert kind == wanted, message
    for part in parts:
        assert part in message
    assert "\n" not in message.strip()
    assert not started


# -- a bug of the user's own


@pytest.mark.parametrize(
    "place",
    ["setup", "configure_optimizers", "training_step", "on_after_backward", "on_train_batch_end", "on_train_end"],
)
def test_a_bug_on_one_rank_ends_every_rank(place: str) -> None:
    began = time.monotonic()
    results = run_ranks(jobs_must_show.users_bug, 4, place, 2)
    assert [result.exit_code for result in results] == [86, 86, 1, 86], "\n".join(map(said, results))
    assert results[2].error.splitlines()[-1] == "ValueError: a bug of my own"
    for rank in (0, 1, 3):
        assert "rank 2 stopped: ValueError: a bug of my own" in results[rank].error.splitlines()[-1]
    assert time.monotonic() - began < jobs_must_show.COLLECTIVE_TIMEOUT  # nobody has waited until a timeout


def test_a_fault_after_the_step_does_not_apply_the_update_again() -> None:
    for result in run_ranks(jobs_must_show.fault_after_a_step, 4):
        assert result.exit_code == FAIL_STOP_EXIT_CODE, said(result)
        assert "a fault after the optimizer's step, inside optimizer_step(): Connection closed by peer" in result.error


# -- set-up


WRAPPED = {
    "blocks": ["", "blocks.0", "blocks.1", "blocks.2"],
    "configure_model builds": ["", "net.blocks.0", "net.blocks.1", "net.blocks.2"],
    "configure_model shards": ["net", "net.blocks.0"],
}


@pytest.mark.parametrize("model", jobs_must_show.MODELS)
def test_ranks_start_equal_from_different_seeds_however_the_model_is_sharded(model: str) -> None:
    runs = [values(run_ranks(jobs_must_show.set_up, 4, model, *faults)) for faults in ([], [BACKWARD])]
    for ranks in runs:
        assert all(one["wrapped"] == WRAPPED[model] for one in ranks)
        for name in ("start", "weights"):  # ranks 0 and 2 hold one shard, 1 and 3 the other
            assert ranks[0][name] == ranks[2][name] != ranks[1][name] == ranks[3][name]
    undisturbed, repaired = runs
    assert [one["incidents"] for one in undisturbed] == [0] * 4
    assert [one["incidents"] for one in repaired] == [1] * 4
    assert [one["end"] for one in repaired] == [one["end"] for one in undisturbed]


# -- accumulation and data


@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_are_communicated_by_the_last_micro_batch_alone(accumulate: int) -> None:
    units = 3 + 1  # blocks and root
    for calls in values(run_ranks(jobs_must_show.collectives, 4, accumulate)):
        assert len(calls) == 2 * accumulate
        for index, counts in enumerate(calls):
            reductions = units if index % accumulate == accumulate - 1 else 0
            assert counts.get("reduce_scatter_single", 0) == counts.get("all_reduce", 0) == reductions
            assert counts["all_gather_single"] > 0


def test_every_process_reads_data_of_its_own() -> None:
    runs = [values(run_ranks(jobs_must_show.data, 4, *faults)) for faults in ([], [BACKWARD])]
    for ranks in runs:
        assert [len(numbers) for numbers in ranks] == [16] * 4
        assert sorted(sum(ranks, [])) == list(range(64))
    assert runs[0] == runs[1]


# -- precision


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "a scaler's 16-mixed"])
def test_a_fault_is_exact_in_lower_precision(precision: str) -> None:
    dtype = "torch.float16" if "16-mixed" in precision and "bf16" not in precision else "torch.bfloat16"
    faults = [Fault.parse(text) for text in ("backward@1:1:exception", "backward@2:3", "vote@3:0:exception")]
    undisturbed, repaired = (
        values(run_ranks(jobs_must_show.precision, 4, precision, *some)) for some in ([], faults)
    )
    for plain, one in zip(undisturbed, repaired, strict=True):
        assert plain["dtypes"] == one["dtypes"] == [dtype]
        redo, retry, vote = (incident["action"] for incident in one["incidents"])
        assert (redo, retry) == ("redo", "retry")
        assert vote in ("roll_forward", "retry")  # a peer may still be clipping
        assert one["digest"] == plain["digest"]
        assert one["scales"] == plain["scales"]
        if "scaler" in precision:
            assert len(set(one["scales"])) > 1  # updates were skipped and the scale has moved


def test_the_precision_that_lightning_refuses_for_fsdp2_by_name() -> None:
    for result in run_ranks(jobs_must_show.precision, 4, "16-mixed"):
        assert result.exit_code == 1
        assert "does not support `Fabric(..., precision='16-mixed')`" in result.error


# -- launchers


def launch(command: list[str], *arguments: Any) -> subprocess.CompletedProcess[str]:
    """Run the script in fresh interpreters."""
    set_by_launchers = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in set_by_launchers}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent), environment.get("PYTHONPATH", "")])
    script = [str(TESTS / "launched.py"), *map(str, arguments)]
    return subprocess.run(
        [sys.executable, *command, *script], env=environment, capture_output=True, text=True, timeout=240
    )


def launch_to_the_end(folder: Path, command: list[str], update: int, rank: int) -> list[dict[str, Any]]:
    """What each of the four ranks ended with."""
    result = launch(command, folder, update, rank)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "goodput" in result.stdout.lower()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


def check_launched(ranks: list[dict[str, Any]], launcher: str, reference: Any) -> None:
    assert [one["strategy"] for one in ranks] == ["ResilientHSDPStrategy"] * 4
    assert ranks[0]["launcher"] == launcher
    assert all([incident["outcome"] for incident in one["incidents"]] == ["recovered"] for one in ranks)
    assert [one["digest"] for one in ranks] == [one["digest"] for one in reference(updates=3)]


def test_under_lightnings_own_launcher(tmp_path: Path, reference: Any) -> None:
    check_launched(launch_to_the_end(tmp_path, [], 1, 3), "_SubprocessScriptLauncher", reference)


def test_lightnings_own_launcher_ends_with_the_status_of_a_fail_stop(tmp_path: Path) -> None:
    """Its observer would kill rank 0, which is the command, soon after another rank has been lost."""
    result = launch([], tmp_path, 1, 3, "kill")
    assert result.returncode == FAIL_STOP_EXIT_CODE, result.stdout + result.stderr
    assert "rank 3 stopped: its process" in result.stderr


def test_under_torchrun(tmp_path: Path, reference: Any) -> None:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=4", f"--master-port={free_port()}"]
    check_launched(launch_to_the_end(tmp_path, torchrun, 1, 0), "NoneType", reference)

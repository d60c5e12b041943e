"""FSDP1 under the Trainer: bit-exact after a fault in any phase of an update, and every reference redirected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jobs_fsdp1_fit as jobs
import pytest
from cluster import RankResult, run_ranks, values

from lightning_accelpact.recovery.action import Action
from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint

# Where a fault strikes, each in an update of its own; the last one is a boundary after which nobody begins an update
PLACES = [
    (FaultPoint.START, None),
    (FaultPoint.START, None),
    (FaultPoint.FORWARD, 0),
    (FaultPoint.FORWARD, None),
    (FaultPoint.BACKWARD, 0),
    (FaultPoint.BACKWARD, None),
    (FaultPoint.ALL_REDUCE, None),
    (FaultPoint.VOTE, None),
    (FaultPoint.STEP, None),
    (FaultPoint.BOUNDARY, None),
    (FaultPoint.BOUNDARY, None),
]
SMALL = {"layers": 2, "updates": len(PLACES) - 1}


def faults(kind: FaultKind, victim: int) -> list[Fault]:
    """One at each place."""
    return [
        Fault(point=point, update=update, micro_batch=micro_batch, rank=victim, kind=kind)
        for update, (point, micro_batch) in enumerate(PLACES)
    ]


@pytest.fixture(scope="module")
def undisturbed() -> Any:
    """Runs without a fault, on every rank; once for each configuration."""
    known: dict[str, list[dict[str, Any]]] = {}

    def run(**options: Any) -> list[dict[str, Any]]:
        key = repr(sorted(options.items()))
        if key not in known:
            known[key] = values(run_ranks(jobs.fit, 4, options))
        return known[key]

    return run


def compared(found: list[Fault], undisturbed: Any, policy: str, **options: Any) -> list[dict[str, Any]]:
    """All ranks' incidents of a run with these faults, which differs in nothing from one without, after no update."""
    results = values(run_ranks(jobs.fit, 4, {"faults": found, "uncommitted": policy, **options}))
    for rank, (result, expected) in enumerate(zip(results, undisturbed(**options), strict=True)):
        for key in ("digests", "digest", "updates", "global_step", "rate", "logged"):
            assert result[key] == expected[key], f"rank {rank}: {key} differs"
    incidents = [incident for result in results for incident in result["incidents"]]
    assert {incident["rank"] for incident in incidents} == {0, 1, 2, 3}
    assert {incident["outcome"] for incident in incidents} == {"recovered"}
    assert all(incident["stale_references"] == 0 < incident["references"] for incident in incidents)
    return incidents


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("kind", [FaultKind.EXCEPTION, FaultKind.SOCKETS], ids=lambda kind: kind.value)
@pytest.mark.parametrize("policy", ["retry", "redo"])
def test_a_fault_in_every_phase_changes_nothing(policy: str, kind: FaultKind, victim: int, undisturbed: Any) -> None:
    incidents = compared(faults(kind, victim), undisturbed, policy, **SMALL)
    actions = {incident["action"] for incident in incidents}
    if kind is FaultKind.SOCKETS and policy == "retry":
        assert actions == {Action.RETRY.value}
        assert all(incident["redone_micro_batches"] == 0 for incident in incidents)
    else:
        assert Action.REDO.value in actions
    assert policy == "retry" or Action.RETRY.value not in actions


def test_a_fault_in_mixed_precision_changes_nothing(undisturbed: Any) -> None:
    incidents = compared(
        [Fault.parse("backward@1.0:3:exception"), Fault.parse("backward@2:0")],
        undisturbed, "retry", layers=2, updates=4, precision="bf16-mixed",
    )  # fmt: skip
    assert {incident["action"] for incident in incidents} == {Action.REDO.value, Action.RETRY.value}


def test_a_fault_in_the_first_middle_and_last_micro_batch(undisturbed: Any) -> None:
    found = [
        Fault(point=point, update=update, micro_batch=micro_batch, rank=update % 4, kind=kind)
        for update, (point, micro_batch, kind) in enumerate(
            (point, micro_batch, kind)
            for micro_batch in (0, 2, 3)
            for point in (FaultPoint.FORWARD, FaultPoint.BACKWARD)
            for kind in (FaultKind.EXCEPTION, FaultKind.COLLECTIVE)
        )
    ]
    incidents = compared(found, undisturbed, "retry", layers=2, updates=len(found), accumulate=4)
    assert {incident["action"] for incident in incidents} == {Action.REDO.value, Action.RETRY.value}


@pytest.mark.parametrize("victim", [0, 3])
def test_a_fault_between_two_updates_preserves_everything(victim: int, undisturbed: Any) -> None:
    """Nothing is run again, even where nothing may be."""
    fault = Fault(point=FaultPoint.BOUNDARY, update=2, rank=victim, kind=FaultKind.EXCEPTION)
    incidents = compared([fault], undisturbed, "restart", layers=2, updates=2)
    assert {incident["action"] for incident in incidents} == {Action.PRESERVE.value}


# -- references


def test_exactly_the_papers_references_are_redirected_and_none_is_left() -> None:
    """32 layers and the root: counted by the repair, and by a walk over all that the trainer reaches."""
    units = 32 + 1
    for rank, found in enumerate(values(run_ranks(jobs.census, 4, Fault.parse("backward@1:3"), units - 1))):
        redirected, incident = found["redirected"], found["incident"]
        assert redirected["_inter_node_pg"] == 33
        assert redirected["process_group"] == 3 * units + 1  # units, handles, states of hooks; the execution order
        references = 4 * units + 1 + 2  # and both groups in the mesh's registry
        assert (incident["references"], incident["stale_references"]) == (references, 0)
        before, after = found["before"], found["after"]
        assert before["retired"] >= references  # the walk finds all that the repair will find
        assert after["retired"] == 0
        assert after["current"] == before["current"]
        assert found["alive"] == 0  # nor does anything that the walk does not come to
        print(f"rank {rank}: {references} references rebound in {incident['rebind_s'] * 1e3:.2f} ms,"
              f" {after['walked']} named objects walked over")  # fmt: skip


def said(result: RankResult) -> str:
    """All that a rank has printed and raised."""
    return f"{result.output}\n{result.error}"


def test_without_rebinding_the_next_synchronized_backward_fails() -> None:
    """As in the paper: seven micro-batches pass, and the eighth reduces over the group that is no more."""
    results = run_ranks(jobs.without_rebinding, 4, Fault.parse("boundary@2:3:exception"))
    for result in results:
        assert result.exit_code != 0, said(result)
        assert "BACKWARD 2.7" not in result.output, said(result)
    # The first one to come to the eighth stops the others wherever they are
    assert any("BACKWARD 2.6" in result.output for result in results)
    told = "\n".join(result.error for result in results)
    assert "dist.all_reduce(new_sharded_grad, group=state._inter_node_pg)" in told
    assert "is not initialized in the world group map" in told


# -- outside an update


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_validations_and_checkpoints_run_again(state_dict_type: str, tmp_path: Path) -> None:
    plain = values(run_ranks(jobs.evaluate_and_save, 4, tmp_path, state_dict_type, False))
    struck = values(run_ranks(jobs.evaluate_and_save, 4, tmp_path, state_dict_type, True))
    for before, after in zip(plain, struck, strict=True):
        assert not before["first"]["incidents"]
        assert len(after["first"]["incidents"]) >= 2
        for run in ("first", "second"):
            for key in ("digest", "updates", "error"):
                assert after[run][key] == before[run][key], (run, key)


def test_a_validation_after_the_fit_goes_on_with_what_was_sharded() -> None:
    for facts in values(run_ranks(jobs.fit_and_evaluate, 4)):
        assert facts["validated"] == facts["fitted"]
        assert facts["digest_after"] == facts["digest"]
        (incident,) = facts["incidents"]
        assert (incident["outcome"], incident["stale_references"]) == ("recovered", 0)
        assert "has been sharded by another strategy" in facts["refused"]


# -- models


def test_a_module_that_wraps_itself_is_sharded_as_a_whole_and_its_replicas_stay_alike() -> None:
    plain = values(run_ranks(jobs.fit_self_wrapped, 4, None))
    struck = values(run_ranks(jobs.fit_self_wrapped, 4, Fault.parse("backward@1:3:exception")))
    for before, after in zip(plain, struck, strict=True):
        assert (before["units"], len(before["incidents"]), len(after["incidents"])) == (4 + 1, 0, 1)
        assert after["digest"] == before["digest"]
        assert before["divergences"] == after["divergences"] == 0


def test_what_cannot_be_protected_is_refused() -> None:
    (said,) = values(run_ranks(jobs.refusals, 1))
    assert "Manual sets automatic_optimization=False" in said["manual"]
    assert "shard=1: FSDP1 would not average gradients over the replicas" in said["shard"]
    assert "cannot protect a model with sharding_strategy=NO_SHARD: it must be HYBRID_SHARD" in said["wrapped"]

"""The adapter to FSDP1: what it touches is there, and a model that was cut short anywhere trains on exactly."""

from __future__ import annotations

from typing import Any

import adapters
import jobs_fsdp1
import pytest
import torch
from cluster import run_ranks, values
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.fsdp import FullyShardedDataParallel, _common_utils, _flat_param
from torch.distributed.fsdp._flat_param import HandleTrainingState
from torch.distributed.utils import _free_storage

from lightning_accelpact.recovery import fsdp1

# Whose attribute each touched name is; looked up on a real model's objects in the middle of a pass
TOUCHED: dict[str, list[str]] = {
    "FullyShardedDataParallel": [
        "sharding_strategy", "cpu_offload", "training_state", "process_group", "_inter_node_pg", "_handle",
        "_use_orig_params", "_is_root", "_sync_gradients", "_unshard_event", "_unshard_params_ctx",
        "_post_backward_callback_queued", "_free_event_queue", "_exec_order_data", "_device_mesh", "_comm_hook",
        *fsdp1.HOOK_STATES,
    ],
    "FlatParamHandle": [
        "flat_param", "process_group", "reshard", "_training_state", "_post_forward_index", *fsdp1._FLAGS,
    ],
    "FlatParameter": ["_params", "_shared_params", "_tensors", "_local_shard", "_post_backward_called", "_post_backward_hook_state"],
    "_ExecOrderData": ["process_group", "handles_post_forward_order", "current_order_index"],
    "_FreeEventQueue": ["_queue"],
}  # fmt: skip
IN_OTHER_PASSES = {"_saved_grad_shard"}  # while gradients are reduced
IMPORTED = {"_common_utils", "_flat_param", "_free_storage"}

_TORCH = f"torch {torch.__version__}"


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What four ranks have found, the same on all of them."""
    found = values(run_ranks(jobs_fsdp1.fsdp1_facts, 4))
    assert all(one == found[0] for one in found)
    return found[0]


def test_torch_is_a_version_that_was_checked() -> None:
    adapters.require_checked(fsdp1, "torch", torch.__version__, fsdp1.CHECKED_TORCH)


@pytest.mark.parametrize("owner", TOUCHED)
def test_what_the_adapter_touches_is_there(owner: str, facts: dict[str, Any]) -> None:
    adapters.require(fsdp1, _TORCH, owner, facts["attributes"][owner], *TOUCHED[owner])


def test_this_list_is_complete() -> None:
    listed = {name for names in TOUCHED.values() for name in names}
    assert adapters.private_names(fsdp1) - listed <= IN_OTHER_PASSES | IMPORTED


def test_a_gradient_is_kept_aside_under_the_name_that_is_dropped() -> None:
    """Whether it is there in the middle of a reduction is shown by the passes that end in one."""
    assert "_saved_grad_shard" in _source_of(_flat_param)
    assert {"_full_prec_full_param_padded", "_mp_shard"} <= set(_source_of(_flat_param))


def _source_of(module: Any) -> set[str]:
    codes = [one.__code__ for one in vars(module.FlatParamHandle).values() if hasattr(one, "__code__")]
    return {name for code in codes for name in (*code.co_names, *map(str, code.co_consts))}


def test_what_is_imported_is_there() -> None:
    assert {"IDLE", "FORWARD_BACKWARD"} <= set(_common_utils.TrainingState.__members__)
    assert "IDLE" in HandleTrainingState.__members__
    assert callable(_free_storage)
    assert hasattr(FullyShardedDataParallel, "clip_grad_norm_")


@pytest.mark.parametrize("variant", jobs_fsdp1.VARIANTS)
def test_a_write_to_the_weights_is_noticed(variant: str, facts: dict[str, Any]) -> None:
    """Not the passes of an update, but an optimizer's step."""
    assert facts["written"][variant] == [False, True]


@pytest.mark.parametrize("variant", jobs_fsdp1.VARIANTS)
def test_an_update_that_ends_in_any_of_its_collectives_runs_again_exactly(variant: str, facts: dict[str, Any]) -> None:
    found = facts["aborted"][variant]
    # A forward gathers all four units; a backward gathers the blocks again, and reduces in two steps in the last one
    passes = 2 * (4 + 3) + 2 * 4
    assert found["collectives"] == (passes - 2 if variant == "frozen" else passes)
    assert {name: found[name] for name in ("aborted", "busy", "idle", "clean", "exact")} == dict.fromkeys(
        ("aborted", "busy", "idle", "clean", "exact"), found["collectives"]
    )


def test_a_reset_before_the_first_forward_changes_nothing(facts: dict[str, Any]) -> None:
    assert facts["before_first_forward"]


def test_a_redo_is_exact_because_gradients_are_dropped(facts: dict[str, Any]) -> None:
    assert facts["dropped"] == {True: True, False: False}


def test_an_evaluation_that_ends_between_two_micro_batches_leaves_their_gradients(facts: dict[str, Any]) -> None:
    assert facts["kept"] == {"aborted": 4, "exact": 4}


def test_a_state_dict_that_ends_in_any_of_its_collectives_is_taken_again(facts: dict[str, Any]) -> None:
    assert facts["state_dict"] == {"aborted": 4, "whole": 4, "exact": 4}


def test_what_was_not_proven_is_named(facts: dict[str, Any]) -> None:
    assert {name: said.partition(":")[0] for name, said in facts["unsupported"].items()} == {
        name: name for name in jobs_fsdp1.UNSUPPORTED
    }


def test_parameters_of_a_unit_further_out_are_told(facts: dict[str, Any]) -> None:
    assert facts["orphans"] == [0, 4, 0]  # those of the root's embedding and head


def test_gradient_sync_is_switched_for_all_units(facts: dict[str, Any]) -> None:
    assert facts["sync"] == [True, False, True]


@pytest.mark.parametrize("layers", [1, 3])
def test_every_place_that_names_a_group_is_found(layers: int, facts: dict[str, Any]) -> None:
    units = layers + 1  # the root has parameters of its own
    assert facts["places"][layers] == {
        "units": units,
        "handles": units,
        "shards": units,
        "meshes": 1,
        "inter_node": 2 * units + 1,  # each unit itself and the state of its hook, and the mesh's registry
        "keys": {"_inter_node_pg": units, "process_group": 3 * units + 1},  # unit, handle, hook; the execution order
        "references": 4 * units + 1 + 2,
    }


def test_a_root_without_parameters_has_no_handle(facts: dict[str, Any]) -> None:
    places = facts["places_of_a_bare_root"]
    assert (places["units"], places["handles"], places["keys"]) == (3, 2, {"_inter_node_pg": 3, "process_group": 9})


@pytest.mark.parametrize("bare", [False, True], ids=["root with parameters", "bare root"])
def test_the_last_reduction_is_hooked_between_its_two_halves(bare: bool, facts: dict[str, Any]) -> None:
    found = facts["last_reduction"][bare]
    each = ["reduce_scatter_single", "all_reduce"]
    assert found["events"] == each * (found["handles"] - 1) + ["reduce_scatter_single", "hook", "all_reduce"]


def test_slots_are_a_mapping() -> None:
    """The state of a communication hook has no dictionary."""
    state = DefaultState.__new__(DefaultState)
    state.process_group, state.world_size = "old", 2
    slots = fsdp1.Slots(state)
    assert dict(slots) == {"process_group": "old", "world_size": 2}
    assert len(slots) == 2
    slots["process_group"] = "new"
    assert state.process_group == "new"
    del slots["world_size"]
    assert list(slots) == ["process_group"]

"""The adapter to FSDP2: what it touches is there, and a model that was cut short trains on exactly."""

from __future__ import annotations

import functools
from typing import Any

import adapters
import jobs_fsdp2
import pytest
import torch
from cluster import run_ranks, values
from torch.distributed.fsdp import FSDPModule

from lightning_accelpact.recovery import fsdp2

# Whose attribute each touched name is; looked up on a real model's objects
TOUCHED: dict[str, list[str]] = {
    "FSDPModule": ["_get_fsdp_state", "reset_iter_state", "set_requires_gradient_sync", "_modules"],
    "FSDPState": ["_fsdp_param_groups", "_is_root"],
    "FSDPParamGroup": ["_all_gather_result", "_all_gather_comm", "_reduce_scatter_comm", "fsdp_params", "reduce_grads",
                       "mesh_info", "post_forward_mesh_info"],
    "FSDPParam": ["unsharded_accumulated_grad", "_unsharded_param", "sharded_param"],
    "FSDPMeshInfo": ["mesh", "spmd_mesh", *fsdp2.GROUP_ATTRIBUTES],
    "Parameter": ["_post_accumulate_grad_hooks", "_local_tensor"],
}  # fmt: skip

_TORCH = f"torch {torch.__version__}"


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What four ranks have found, the same on all of them."""
    found = values(run_ranks(jobs_fsdp2.fsdp_facts, 4))
    assert all(one == found[0] for one in found)
    return found[0]


def test_torch_is_a_version_that_was_checked() -> None:
    adapters.require_checked(fsdp2, "torch", torch.__version__, fsdp2.CHECKED_TORCH)


@pytest.mark.parametrize("owner", TOUCHED)
def test_what_the_adapter_touches_is_there(owner: str, facts: dict[str, Any]) -> None:
    adapters.require(fsdp2, _TORCH, owner, facts["attributes"][owner], *TOUCHED[owner])


def test_this_list_is_complete() -> None:
    assert adapters.private_names(fsdp2) <= {name for names in TOUCHED.values() for name in names}


def test_torch_still_does_not_do_what_its_docstring_says(facts: dict[str, Any]) -> None:
    """Once torch drops the gradients itself, ``drop_unsharded_gradients`` can go."""
    assert "no_sync`` grad-accumulation state" in FSDPModule.reset_iter_state.__doc__
    assert facts["drop"][False]["exact"] is False


def test_a_redo_is_exact_because_unsharded_gradients_are_dropped(facts: dict[str, Any]) -> None:
    assert facts["drop"] == {True: {"exact": True}, False: {"exact": False}}


def test_a_reset_before_the_first_forward_changes_nothing(facts: dict[str, Any]) -> None:
    assert facts["before_first_forward"]


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_reset_after_a_pass_that_was_cut_short(way: str, facts: dict[str, Any]) -> None:
    assert facts["after_abort"][way] == {"aborted": True, "busy": True, "idle": True, "exact": True}


def test_gradient_sync_is_switched_for_all_groups(facts: dict[str, Any]) -> None:
    assert facts["sync"] == [True, False, True]


@pytest.mark.parametrize("layers", [1, 3])
def test_every_place_that_names_a_group_is_found(layers: int, facts: dict[str, Any]) -> None:
    units = layers + 1  # the root has parameters of its own
    assert facts["places"][layers] == {
        "states": units,
        "param_groups": units,
        "wrapped": units,
        "parameters": 2 * layers + 4,
        "meshes": 1,
        "keys": ["replicate_process_group", "shard_process_group"],
        "holders": 2 * units,
        "references": 2 * units + 2,  # and the mesh's registry names both
    }


def test_a_root_without_parameters_has_no_group_to_rebind(facts: dict[str, Any]) -> None:
    places = facts["places_of_a_bare_root"]
    assert (places["states"], places["param_groups"], places["holders"]) == (3, 2, 4)


@pytest.mark.parametrize("bare", [False, True], ids=["root with parameters", "bare root"])
def test_the_last_reduction_is_hooked_between_its_two_halves(bare: bool, facts: dict[str, Any]) -> None:
    found = facts["last_reduction"][bare]
    each = ["reduce_scatter_single", "all_reduce"]
    assert found["events"] == each * (found["groups"] - 1) + ["reduce_scatter_single", "hook", "all_reduce"]


@pytest.mark.parametrize("write", jobs_fsdp2.WRITES)
def test_a_write_to_the_weights_is_noticed(write: str, facts: dict[str, Any]) -> None:
    """Also one that torch does not count, of a list operation or through ``.data``, and one that puts others in place."""
    assert not facts["writes"][f"before {write}"]
    assert facts["writes"][write]


def test_a_method_is_wrapped_once_however_often_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(torch.nn.Module):
        def predict_step(self, batch: Any) -> Any:
            return batch

    def wrap(module: torch.nn.Module, name: str) -> None:
        method = getattr(module, name)
        setattr(module, name, functools.wraps(method)(lambda *args: method(*args)))

    monkeypatch.setattr(fsdp2, "register_fsdp_forward_method", wrap)
    module = Module()
    fsdp2.register_forward_method(module, "predict_step")
    first = module.predict_step
    fsdp2.register_forward_method(module, "predict_step")
    assert module.predict_step is first
    assert module.predict_step(3) == 3

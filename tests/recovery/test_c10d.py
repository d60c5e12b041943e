"""The adapter to ``torch.distributed``: what it touches is there, and groups come back under their names."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import adapters
import jobs_recovery
import pytest
import torch
import torch.distributed as dist
from cluster import run_ranks, values
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_accelpact.recovery import c10d

_TORCH = f"torch {torch.__version__}"

# Whose attribute each touched name is
TOUCHED: dict[str, tuple[Any, list[str]]] = {
    "distributed_c10d": (
        distributed_c10d,
        ["_world", "_update_default_pg", "_unregister_all_process_groups", "_new_process_group_helper",
         "_set_pg_timeout", "_abort_process_group", "_resolve_process_group", "BackendConfig"],
    ),
    "distributed_c10d._world": (
        distributed_c10d._world,
        ["pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag", "tags_to_pg", "pg_coalesce_state",
         "group_count"],
    ),
    "distributed_c10d.BackendConfig": (distributed_c10d.BackendConfig, ["get_device_backend_map"]),
    "ProcessGroup": (dist.ProcessGroup, ["_device_types", "_get_backend", "_get_sequence_number_for_group",
                                     "group_desc", "group_name", "allreduce", "all_gather_single",
                                     "reduce_scatter_single", "allgather", "barrier"]),
    "Work": (dist.Work, ["wait", "is_completed", "_get_op_type"]),
    "torch.distributed": (torch.distributed, ["_functional_collectives"]),
    "torch.distributed._functional_collectives": (
        torch.distributed._functional_collectives,
        ["wait_tensor", "all_reduce", "all_gather_single", "reduce_scatter_single", "AsyncCollectiveTensor",
         "_are_we_tracing", "_resolve_group"],
    ),
    "DeviceMesh": (DeviceMesh, ["_get_root_mesh"]),
    "torch._C": (torch._C, ["_distributed_c10d"]),
    "torch._C._distributed_c10d": (torch._C._distributed_c10d, ["ErrorType", "OpType"]),
    "torch": (torch, ["_C"]),
}  # fmt: skip
ON_INSTANCES = {"_pg_registry"}


def test_torch_is_a_version_that_was_checked() -> None:
    adapters.require_checked(c10d, "torch", torch.__version__, c10d.CHECKED_TORCH)


@pytest.mark.parametrize("owner", TOUCHED)
def test_what_the_adapter_touches_is_there(owner: str) -> None:
    present, names = TOUCHED[owner]
    adapters.require(c10d, _TORCH, owner, present, *names)


def test_this_list_is_complete() -> None:
    listed = {name for _, names in TOUCHED.values() for name in names}
    assert adapters.private_names(c10d) - listed == ON_INSTANCES
    assert set(c10d._REGISTRIES) <= listed


@pytest.fixture
def alone() -> Iterator[None]:
    """A default process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_mesh_has_a_registry_of_groups() -> None:
    mesh = init_device_mesh("cpu", (1,))
    adapters.require(c10d, _TORCH, "DeviceMesh", mesh, *ON_INSTANCES)
    assert c10d.mesh_registries(mesh) == [{mesh.get_group().group_name: mesh.get_group()}]


def test_the_helper_that_makes_a_group_takes_what_it_is_given() -> None:
    names = list(inspect.signature(distributed_c10d._new_process_group_helper).parameters)
    assert names[:6] == ["group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name"]
    adapters.require(c10d, _TORCH, "_new_process_group_helper()", names, "timeout", "group_desc")


@pytest.mark.usefixtures("alone")
def test_every_registry_of_torch_is_emptied() -> None:
    """One that a new version adds would keep retired groups alive."""
    world = distributed_c10d._world
    held = {name for name in dir(world) if not name.startswith("_") and isinstance(getattr(world, name), dict)}
    assert held == set(c10d._REGISTRIES)


def test_the_registry_that_is_looked_at_in_every_collective_is_never_replaced() -> None:
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        assert list(c10d._registered) == [dist.group.WORLD]
        dist.destroy_process_group()
        assert c10d._registered is distributed_c10d._world.pg_map
        assert not c10d._registered


@pytest.fixture(scope="module")
def remade() -> list[dict[str, Any]]:
    """Three ranks whose groups, one of all and one of two, have been forgotten and made again twice."""
    return values(run_ranks(jobs_recovery.remake_groups, 3))


def test_a_group_comes_back_under_its_name_with_its_members(remade: list[dict[str, Any]]) -> None:
    sums = {"default_pg": 6.0, "pair": 3.0, "mesh_shard": 4.0}
    for rank, facts in enumerate(remade):
        specs = facts["specs"]
        assert [spec.is_world for spec in specs] == [True] + [False] * (len(specs) - 1)
        assert all(rank in spec.ranks for spec in specs)
        for again in facts["again"]:
            assert again["specs"] == specs
            assert again["names"] == [spec.name for spec in specs]
            assert again["retired"] == len(specs)
            assert again["new"]
            assert again["by_name"]
            assert not again["known_between"]
            assert again["sums"] == {spec.description: sums[spec.description] for spec in specs}
            assert again["group_rank"] == [spec.ranks.index(rank) for spec in specs]
    assert [[spec.ranks for spec in facts["specs"]] for facts in remade] == [
        [(0, 1, 2), (0, 1), (0, 2)], [(0, 1, 2), (0, 1)], [(0, 1, 2), (0, 2)],
    ]  # fmt: skip


def test_a_group_made_after_a_repair_gets_a_name_of_its_own(remade: list[dict[str, Any]]) -> None:
    assert all(facts["count_after"] == facts["count"] for facts in remade)
    names = {facts["later"] for facts in remade if facts["later"]}
    assert len(names) == 1  # the same on both members
    ((name, total),) = names
    assert name not in {spec.name for facts in remade for spec in facts["specs"]}
    assert total == 5.0


def test_a_group_tells_its_backend_and_a_device_for_it(remade: list[dict[str, Any]]) -> None:
    assert all((facts["backends"], facts["device"]) == ({"gloo"}, "cpu") for facts in remade)


def test_a_changed_timeout_counts(remade: list[dict[str, Any]]) -> None:
    assert "200ms" in remade[0]["timeout"]


@pytest.fixture(scope="module")
def waits() -> dict[str, Any]:
    """Rank 0 of two, with interruptible waits."""
    return values(run_ranks(jobs_recovery.late_peer, 2))[0]


def test_an_interruptible_wait_waits_for_a_late_peer(waits: dict[str, Any]) -> None:
    assert waits["late"] == 3.0


def test_a_wait_that_gloo_has_forgotten_to_wake_is_given_up(waits: dict[str, Any]) -> None:
    """No socket was shut here: the flag alone ends the wait, long before the group's timeout of 60 s."""
    assert waits["interrupted"] == ("DistBackendError", "the collective was interrupted: its links are down")


def test_a_wait_with_a_timeout_of_its_own_is_left_alone(waits: dict[str, Any]) -> None:
    assert waits["timeout"][0] == "RuntimeError"
    assert "interrupted" not in waits["timeout"][1]


def test_what_cannot_be_waited_for_in_slices_is_waited_for_in_a_thread() -> None:
    facts = values(run_ranks(jobs_recovery.late_peer_without_slices, 2))[0]
    assert (facts["received"], facts["scattered"]) == (1.0, [0.0, 2.0])
    assert facts["interrupted"] == ("DistBackendError", "the collective was interrupted: its links are down")


def test_inputs_of_functional_collectives_are_copied() -> None:
    """A shard of a DTensor is written to without a count of its own when the DTensor is."""
    assert not any(kind.bulky for kind in c10d._FUNCTIONS.values())


def test_what_is_made_divisible_has_the_bits_of_torchs_own() -> None:
    for facts in values(run_ranks(jobs_recovery.divisible, 3)):
        assert facts["same"] == [True] * 19
        assert facts["threads"] == 0
        assert facts["same without slices"] == [True] * 5
        assert facts["threads without slices"] == 1
        assert facts["bulky"] == [False, False, True]
        assert "outputShape" in facts["mismatch"][1]
        if facts["rank"] == 0:
            for name in ("interrupted", "functional"):
                assert facts[name] == ("DistBackendError", "the collective was interrupted: its links are down")

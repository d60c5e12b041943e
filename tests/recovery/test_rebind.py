"""Rebinding: every reference is counted, redirected and counted again; what is left over raises."""

from __future__ import annotations

from dataclasses import dataclass

import jobs_fsdp2
import pytest
import torch
import torch.distributed as dist
from cluster import run_ranks, values
from torch import nn

from lightning_accelpact.recovery.rebind import Census, Reference, StaleReference, census, rebind, references


@dataclass(eq=False)
class Group:
    """Stands for a process group."""

    group_name: str


class Stubborn(dict):
    """A holder that does not let itself be redirected."""

    def __setitem__(self, key: str, value: object) -> None:
        pass


@pytest.fixture
def old() -> dict[str, Group]:
    return {name: Group(name) for name in ("0", "1", "2")}


@pytest.fixture
def new() -> dict[str, Group]:
    return {name: Group(name) for name in ("0", "1", "2")}


def test_every_reference_follows_its_name(old: dict[str, Group], new: dict[str, Group]) -> None:
    holders = [{"shard": old["1"], "replicate": old["2"]}, {"shard": old["1"], "other": "kept"}]
    found = [Reference(holders[0], "shard"), Reference(holders[0], "replicate"), Reference(holders[1], "shard")]
    assert rebind(found, old.values(), new) == Census(retired=3, stale=0, current=3)
    assert holders == [{"shard": new["1"], "replicate": new["2"]}, {"shard": new["1"], "other": "kept"}]
    assert [reference.group for reference in found] == [new["1"], new["2"], new["1"]]


def test_what_names_no_retired_group_is_left_alone(old: dict[str, Group], new: dict[str, Group]) -> None:
    foreign = Group("1")  # the same name, but not ours
    holder = {"a": old["1"], "b": new["2"], "c": foreign}
    found = [Reference(holder, key) for key in holder]
    assert rebind(found, old.values(), new) == Census(retired=1, stale=0, current=2)
    assert holder == {"a": new["1"], "b": new["2"], "c": foreign}


def test_groups_of_an_earlier_try_are_retired_too(old: dict[str, Group], new: dict[str, Group]) -> None:
    between = {name: Group(name) for name in old}  # made by a repair that was cut short
    holder = {"a": old["1"], "b": between["1"]}
    found = [Reference(holder, key) for key in holder]
    assert rebind(found, [*old.values(), *between.values()], new).retired == 2
    assert holder == {"a": new["1"], "b": new["1"]}


def test_nothing_to_rebind(new: dict[str, Group]) -> None:
    assert rebind([], [], new) == Census(retired=0, stale=0, current=0)


def test_a_missing_replacement_is_named(old: dict[str, Group], new: dict[str, Group]) -> None:
    del new["2"]
    found = [Reference({"replicate_process_group": old["2"]}, "replicate_process_group")]
    with pytest.raises(StaleReference, match="replicate_process_group names the retired group 2, which was not made"):
        rebind(found, old.values(), new)


def test_a_reference_that_cannot_be_redirected_fails_the_repair(old: dict[str, Group], new: dict[str, Group]) -> None:
    found = [Reference(Stubborn(shard=old["1"]), "shard"), Reference({"shard": old["1"]}, "shard")]
    with pytest.raises(StaleReference, match="1 references still name a retired communicator"):
        rebind(found, old.values(), new)


def test_the_census_counts_without_changing(old: dict[str, Group], new: dict[str, Group]) -> None:
    holder = {"a": new["1"], "b": new["1"], "c": Group("x")}
    found = [Reference(holder, key) for key in holder]
    retired = {id(group) for group in old.values()}
    assert census(found, retired, new, before=5) == Census(retired=5, stale=0, current=2)
    with pytest.raises(StaleReference):
        census([Reference({"a": old["0"]}, "a")], retired, new, before=1)


def test_a_group_kept_by_a_module_is_found() -> None:
    """A layer of the user's own that communicates by itself, such as a synchronized norm."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    model[1].process_group = group
    model.store = dist.HashStore()
    (found,) = references(model)
    assert (found.key, found.group) == ("process_group", group)
    other = dist.ProcessGroup(dist.HashStore(), 0, 1)
    found.point_at(other)
    assert model[1].process_group is other


def test_a_plain_model_has_no_references() -> None:
    assert list(references(torch.nn.Linear(1, 1))) == []


def test_a_real_model_trains_on_over_new_groups() -> None:
    """Four ranks as 2 x 2: every group is replaced between two updates of a model of 3 blocks and a root."""
    for facts in values(run_ranks(jobs_fsdp2.rebind_a_model, 4)):
        places = 2 * (3 + 1) + 2  # both groups, for each block and the root, and in the mesh's registry
        assert facts["before"] == places
        kind, message = facts["refused"]  # with one replacement missing
        assert kind == "StaleReference"
        assert "names the retired group" in message
        assert facts["census"] == Census(retired=places, stale=0, current=places)
        assert facts["again"] == Census(retired=0, stale=0, current=places)
        assert facts["exact"]

"""Rebinding: every cached reference to a retired communicator is pointed at its replacement, and counted.

Invariant (paper, section on the state machine): after a repair, no object reachable from the module, the optimizer or
the device mesh names a retired communicator. The count is taken, never assumed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from lightning_accelpact.recovery import c10d, fsdp2
from lightning_accelpact.recovery.modules import walk


class StaleReference(RuntimeError):
    """A reference still names a retired communicator after rebinding."""


@dataclass(frozen=True)
class Reference:
    """One place that names a process group.

    Args:
        holder: The mapping that holds it: an object's attributes, or a registry.
        key: Its key there.
    """

    holder: MutableMapping[str, Any]
    key: str

    @property
    def group(self) -> dist.ProcessGroup:
        """What the reference names now."""
        return self.holder[self.key]

    def point_at(self, group: dist.ProcessGroup) -> None:
        """Redirect the reference."""
        self.holder[self.key] = group


def references(
    root: torch.nn.Module, extra_meshes: Iterable[DeviceMesh] = (), *, wrapper: ModuleType = fsdp2
) -> list[Reference]:
    """Every reference to a process group in the wrapper's state, in device meshes and in the modules' own attributes.

    Args:
        root: The outermost module.
        extra_meshes: Device meshes besides those that the wrapper's state names.
        wrapper: The adapter to what shards the model.
    """
    modules = list(walk(root))
    found = [Reference(holder, key) for holder, key in wrapper.group_holders(modules)]
    for mesh in [*wrapper.meshes(modules), *extra_meshes]:
        found += [Reference(registry, name) for registry in c10d.mesh_registries(mesh) for name in registry]
    for attributes in map(vars, modules):
        found += [Reference(attributes, key) for key, value in attributes.items() if value.__class__ is dist.ProcessGroup]
    return list({(id(reference.holder), reference.key): reference for reference in found}.values())


@dataclass(frozen=True, kw_only=True)
class Census:
    """The count of references before and after a rebinding.

    Args:
        retired: How many named a retired communicator before.
        stale: How many still did afterwards.
        current: How many name a replacement afterwards.
    """

    retired: int
    stale: int
    current: int


def rebind(
    found: list[Reference], retired: Iterable[dist.ProcessGroup], replacements: Mapping[str, dist.ProcessGroup]
) -> Census:
    """Point every reference to a retired communicator at the replacement of the same name.

    Args:
        found: The references to look at, see :func:`references`.
        retired: The communicators that must not be named any more.
        replacements: The new ones by group name.

    Raises:
        StaleReference: if a reference is left over, or names a retired group that has no replacement.
    """
    old = {id(group) for group in retired}
    stale = [reference for reference in found if id(reference.group) in old]
    for reference in stale:
        name = reference.group.group_name
        if name not in replacements:
            raise StaleReference(f"{reference.key} names the retired group {name}, which was not made again")
        reference.point_at(replacements[name])
    return census(found, old, replacements, before=len(stale))


def census(
    found: list[Reference], old: set[int], replacements: Mapping[str, dist.ProcessGroup], *, before: int
) -> Census:
    """Count the references after a rebinding.

    Raises:
        StaleReference: if one still names a retired communicator.
    """
    new = {id(group) for group in replacements.values()}
    left = sum(id(reference.group) in old for reference in found)
    if left:
        raise StaleReference(f"{left} references still name a retired communicator")
    return Census(retired=before, stale=left, current=sum(id(reference.group) in new for reference in found))

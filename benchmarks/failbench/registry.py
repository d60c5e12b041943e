"""What there is to run: the packaged architectures and mechanisms, and those that entry points add."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.failbench.architectures.architecture import Architecture
    from benchmarks.failbench.mechanisms.mechanism import Mechanism

ARCHITECTURES = "accelpact.failbench.architectures"
MECHANISMS = "accelpact.failbench.mechanisms"

# Name -> module and class. Nothing is imported before it is used: a respawned rank shall load what it needs only
_PACKAGED = {
    ARCHITECTURES: {
        "A1": "parameter_server:ParameterServer",
        "A1-async": "parameter_server:AsyncParameterServer",
        "A2": "ring:Ring",
        "A3": "tree:Tree",
        "A4": "pipeline:Pipeline",
        "A5": "tensor_parallel:TensorParallel",
        "A6": "gossip:Gossip",
        "A7": "hybrid:Hybrid",
    },
    MECHANISMS: {
        "FT1": "periodic_disk:PeriodicDisk",
        "FT2": "peer_memory:PeerMemory",
        "FT3": "asynchronous_disk:AsynchronousDisk",
        "FT4": "just_in_time:JustInTime",
        "FT5": "continuous_replication:ContinuousReplication",
        "FT6": "k_replica:KReplica",
        "FT7": "redistribution:Redistribution",
        "FT8": "elastic:Elastic",
        "FT9": "none:NoMechanism",
        "FT10": "accelpact:AccelPact",
    },
}


class UnknownName(ValueError):
    """There is no architecture or mechanism of this name; the message lists those there are."""


class BrokenEntryPoint(ValueError):
    """An entry point names a module or a class that is not there; the message says which."""


def names(group: str) -> tuple[str, ...]:
    """Names of a group, the packaged ones first.

    Args:
        group: :data:`ARCHITECTURES` or :data:`MECHANISMS`.

    Raises:
        ValueError: if two have the same name.
    """
    return tuple(_entries(group))


def architecture(name: str) -> type[Architecture]:
    """The class of an architecture.

    Raises:
        UnknownName: if there is none of this name.
        BrokenEntryPoint: if its module or class cannot be imported.
    """
    return _load(ARCHITECTURES, name)


def mechanism(name: str) -> type[Mechanism]:
    """The class of a mechanism.

    Raises:
        UnknownName: if there is none of this name.
        BrokenEntryPoint: if its module or class cannot be imported.
    """
    return _load(MECHANISMS, name)


def packaged(group: str) -> tuple[str, ...]:
    """Names of those that FailBench brings itself."""
    return tuple(_PACKAGED[group])


def _entries(group: str) -> dict[str, EntryPoint]:
    package = f"benchmarks.failbench.{group.rpartition('.')[2]}"
    found = {name: EntryPoint(name, f"{package}.{value}", group) for name, value in _PACKAGED[group].items()}
    for entry in entry_points(group=group):
        if entry.name in found and found[entry.name].value != entry.value:
            raise ValueError(
                f"two entry points of {group} have the name {entry.name!r}: {found[entry.name].value} and"
                f" {entry.value}; give the latter another name"
            )
        found[entry.name] = entry
    return found


def _load(group: str, name: str) -> type:
    entries = _entries(group)
    if name not in entries:
        raise UnknownName(f"no {group.rpartition('.')[2][:-1]} {name!r}; there are {', '.join(entries)}")
    try:
        return entries[name].load()
    except (ImportError, AttributeError) as error:
        raise BrokenEntryPoint(
            f"the entry point {name} = {entries[name].value} of {group} leads nowhere: {error}"
        ) from error

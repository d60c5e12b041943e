"""What the ranks of a probe do. Each works with the product itself: the repair machine, its control plane, its groups."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from lightning_accelpact.qualification.model import Trained
from lightning_accelpact.recovery import c10d, session
from lightning_accelpact.recovery.action import Action
from lightning_accelpact.recovery.fault import Fault, FaultKind, FaultPoint, InjectedFault
from lightning_accelpact.recovery.options import HsdpShape, RecoveryOptions
from lightning_accelpact.recovery.runtime import HsdpRuntime, Place

EPOCHS = 128
_INSIDE_S = 0.1  # until the peers are inside a collective that a rank stays away from
_WATCHDOG = ("TORCH_NCCL_", "NCCL_")
OPTIONS: dict[str, Any] = {
    "repair_budget": 30.0,
    "collective_timeout": 10.0,
    "rebuild_timeout": 5.0,
    "heartbeat_deadline": 3.0,
}
# A watchdog that kills the process over an incomplete collective does so when its timeout has passed
_TIMED_OUT = {**OPTIONS, "collective_timeout": 3.0, "rebuild_timeout": 2.5, "heartbeat_deadline": 2.5}


class NotQualified(Exception):
    """The stack has not done what it must; the message says what it did."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is to be qualified.

    Args:
        backend: Backend of the training groups.
        device_type: Type of the devices.
        loop: ``module:function`` of the framework's training.
    """

    backend: str
    device_type: str
    loop: str


def rebuild(target: Target, epochs: int = EPOCHS) -> dict[str, Any]:
    """Break a collective, retire its communicator, rebuild it, and run collectives on the new one (paper, platforms)."""
    runtime = _runtime(target, OPTIONS)
    machine, victim = runtime.machine, dist.get_world_size() - 1
    first = iter([True])

    def collective() -> None:
        if machine.progress.rank == victim and next(first, False):
            time.sleep(_INSIDE_S)
            raise InjectedFault("injected: this rank stays away")
        _all_reduce(target, 1)

    runtime.operations.run(collective)
    _require(runtime, Action.PRESERVE)
    for epoch in range(epochs):
        _all_reduce(target, epoch)
    repair_s = max(incident.total_s for incident in runtime.incidents)
    _end(runtime)
    return {"seconds": repair_s, "seen": f"{epochs} collective epochs after each repair"}


def again(target: Target) -> dict[str, Any]:
    """Break a collective between two updates that all ranks wait for, and run it again in place."""
    runtime = _runtime(target, OPTIONS)
    machine, victim = runtime.machine, dist.get_world_size() - 1
    _all_reduce(target, 1)
    if machine.progress.rank == victim:
        machine.faults.strike(Fault(point=FaultPoint.BOUNDARY, update=0, rank=victim, kind=FaultKind.COLLECTIVE))
    _all_reduce(target, 2)
    _require(runtime, Action.RETRY)
    _all_reduce(target, 3)
    repair_s = runtime.incidents[-1].total_s
    _end(runtime)
    return {"seconds": repair_s, "seen": "a collective between two updates"}


def watchdog(target: Target) -> dict[str, Any]:
    """Let a collective run into its timeout: no watchdog may end the process, and the group can be replaced."""
    runtime = _runtime(target, _TIMED_OUT)
    machine, victim = runtime.machine, dist.get_world_size() - 1
    late = iter([True])

    def collective() -> None:
        if machine.progress.rank == victim and next(late, False):
            time.sleep(_TIMED_OUT["collective_timeout"] + 1)
        _all_reduce(target, 1)

    runtime.operations.run(collective)
    _require(runtime, Action.PRESERVE)
    _all_reduce(target, 2)
    repair_s = max(incident.total_s for incident in runtime.incidents)
    _end(runtime)
    settings = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(_WATCHDOG))
    return {"seconds": repair_s, "seen": ", ".join(settings) or "no settings in the environment"}


def preserve(target: Target) -> dict[str, Any]:
    """Train with faults between two updates, after which everything stays as it is (paper, level 1), and in a step."""
    points, kinds = (FaultPoint.BOUNDARY, FaultPoint.BOUNDARY, FaultPoint.STEP), (FaultKind.EXCEPTION,) * 3
    return _trained(target, points, kinds, "restart")


def retry(target: Target) -> dict[str, Any]:
    """Train with faults whose collectives run again in place; the end must be that of an undisturbed run."""
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    shape = HsdpShape.resolve("auto", "auto", num_nodes=size // local, devices_per_node=local)
    if shape.shard == 1:  # no collective in a forward pass, and no reduce-scatter before the all-reduce
        points, kinds = (FaultPoint.FORWARD, FaultPoint.BACKWARD), (FaultKind.SOCKETS, FaultKind.COLLECTIVE)
    else:
        points = (FaultPoint.FORWARD, FaultPoint.BACKWARD, FaultPoint.ALL_REDUCE)
        kinds = (FaultKind.COLLECTIVE, FaultKind.SOCKETS, FaultKind.COLLECTIVE)
    return _trained(target, points, kinds, "retry")


def redo(target: Target) -> dict[str, Any]:
    """Train with faults after which the update runs again from memory; the end must be that of an undisturbed run."""
    points = (FaultPoint.FORWARD, FaultPoint.BACKWARD)
    kinds = (FaultKind.EXCEPTION, FaultKind.SOCKETS)
    return _trained(target, points, kinds, "redo")


def _trained(
    target: Target, points: Sequence[FaultPoint], kinds: Sequence[FaultKind], uncommitted: str
) -> dict[str, Any]:
    module, _, name = target.loop.partition(":")
    train: Trained = getattr(import_module(module), name)
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    faults = [
        Fault(point=point, update=update, rank=update % size, kind=kind)
        for update, (point, kind) in enumerate(zip(points, kinds, strict=True), 1)
    ]
    options = {**OPTIONS, "uncommitted": uncommitted}
    accelerator = "gpu" if target.device_type == "cuda" else "cpu"
    place = dict(os.environ)
    expected, _ = train([], options, accelerator, target.backend)
    os.environ.update(place)  # Lightning takes its own out of it at the end
    digest, incidents = train(faults, options, accelerator, target.backend)
    if len(incidents) != len(faults):
        raise NotQualified(f"{len(faults)} faults struck, and {len(incidents)} repairs are on record")
    return {
        "exact": digest == expected,
        "seconds": max(incident["total_s"] for incident in incidents),
        "seen": f"bit-exact after {len(faults)} faults",
        "repairs": [
            {name: incident[name] for name in ("phase", "verb", "references", "stale_references")}
            for incident in incidents
        ],
    }


def _runtime(target: Target, options: dict[str, Any]) -> HsdpRuntime:
    """All ranks as replicas of nothing, with a machine that repairs their groups."""
    rank, size, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    torch.set_num_threads(1)
    if target.device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    runtime = HsdpRuntime(
        options=RecoveryOptions(envelope="off", **options), replicate=size, shard=1, framework="none", resume_with=""
    )
    runtime.check(
        num_nodes=size // local, devices_per_node=local, backend=target.backend, device_type=target.device_type
    )
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    place = Place(
        rank=rank, world_size=size, host=host, port=port, backend=target.backend, device_type=target.device_type
    )
    runtime.begin(place)
    return runtime


def _all_reduce(target: Target, number: int) -> None:
    """One collective whose result is looked at."""
    value = torch.full((4,), float(number + dist.get_rank()), device=c10d.device_of(dist.group.WORLD))
    dist.all_reduce(value)
    size = dist.get_world_size()
    expected = size * number + size * (size - 1) / 2
    if value.tolist() != [expected] * 4:
        raise NotQualified(f"an all-reduce gave {value.tolist()} where {expected:g} is right")


def _require(runtime: HsdpRuntime, action: Action) -> None:
    """One repair is on record, of this action."""
    found = [f"{incident.action} ({incident.outcome})" for incident in runtime.incidents]
    if found != [f"{action.value} (recovered)"]:
        raise NotQualified(f"one {action.value} was to be on record, but it is {found}")


def _end(runtime: HsdpRuntime) -> None:
    """Leave together."""
    runtime.finish()
    runtime.detach()


PROBES: dict[str, Callable[[Target], dict[str, Any]]] = {
    probe.__name__: probe for probe in (rebuild, again, watchdog, preserve, retry, redo)
}


def run(name: str, target: Target) -> dict[str, Any]:
    """One probe on this rank, to its good end."""
    try:
        return PROBES[name](target)
    finally:
        session.close()  # no exit handler runs in a forked process

"""What the ranks of the recovery core's tests do: process groups and communicators, without a trainer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives

from lightning_accelpact.recovery import c10d
from lightning_accelpact.recovery.c10d import GroupSpec
from lightning_accelpact.recovery.communicator import CommunicatorLost, Communicators, is_communication_error
from lightning_accelpact.recovery.endpoint import Endpoint
from lightning_accelpact.recovery.session import Session
from lightning_accelpact.recovery.waiter import Waiter

LONG = timedelta(seconds=60)


def rank_and_size() -> tuple[int, int]:
    """This rank and how many there are."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def meeting_store() -> dist.Store:
    """A store that all ranks share; rank 0 serves it."""
    rank, size = rank_and_size()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, size, is_master=rank == 0, timeout=LONG)


def world_spec(size: int) -> GroupSpec:
    """The default group."""
    return GroupSpec(name="0", ranks=tuple(range(size)), backend="gloo", description="", is_world=True)


def total(group: dist.ProcessGroup | None = None) -> float:
    """The sum of (rank + 1) over a group's members."""
    value = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(value, group=group)
    return value.item()


def absent(store: dist.Store, name: str, work: Callable[[], Any]) -> Any:
    """Rank 0 works while the others stay away, until it is done; it serves the store, so it waits until they know."""
    rank, size = rank_and_size()
    if rank != 0:
        store.wait([name], LONG)
        store.set(f"{name}/heard by {rank}", "")
        return None
    try:
        return work()
    finally:
        store.set(name, "")
        store.wait([f"{name}/heard by {peer}" for peer in range(1, size)], LONG)


def meet(store: dist.Store, name: str) -> None:
    """Wait for all ranks without a process group: past this point nobody is inside an earlier collective."""
    _, size = rank_and_size()
    if store.add(f"{name}/count", 1) == size:
        store.set(name, "")
    store.wait([name], LONG)


def error_of(work: Callable[[], Any]) -> Exception | None:
    """What ``work`` raises."""
    try:
        work()
    except Exception as error:  # whatever it is, the test looks at it
        return error
    return None


# -- c10d


def remake_groups() -> dict[str, Any]:
    """Forget and make the default group and a group of ranks 2 and 0 again, twice, then one group more."""
    rank, size = rank_and_size()
    store = meeting_store()
    c10d.create_group(world_spec(size), rank=rank, store=dist.PrefixStore("0", store), timeout=LONG)
    dist.new_group([0, 1], group_desc="pair")
    dist.new_group([0, 2], group_desc="mesh_shard", timeout=timedelta(seconds=30))
    original = c10d.registered_groups()
    facts: dict[str, Any] = {"specs": list(original), "count": c10d.distributed_c10d._world.group_count, "again": []}
    for generation in (1, 2):
        retired = c10d.forget_groups()
        facts["again"].append(_remade(original, retired, dist.PrefixStore(str(generation), store)))
    facts["count_after"] = c10d.distributed_c10d._world.group_count
    later = dist.new_group([1, 2])
    facts["later"] = (later.group_name, total(later)) if rank else None
    facts["backends"] = c10d.backend_names(dist.group.WORLD)
    facts["device"] = c10d.device_of(dist.group.WORLD).type
    facts["timeout"] = absent(store, "timeout", _too_short)
    return facts


def _remade(specs: dict[GroupSpec, Any], retired: list[Any], store: dist.Store) -> dict[str, Any]:
    known = dist.is_initialized() or bool(c10d.registered_groups())
    rank, _ = rank_and_size()
    groups = {spec.name: c10d.create_group(spec, rank=rank, store=store, timeout=LONG) for spec in specs}
    return {
        "known_between": known,
        "retired": len(retired),
        "names": [group.group_name for group in groups.values()],
        "sums": {spec.description or "world": total(groups[spec.name]) for spec in specs},
        "specs": list(c10d.registered_groups()),
        "new": all(group is not old for group in groups.values() for old in retired),
        "by_name": all(
            torch.distributed.distributed_c10d._resolve_process_group(name) is group for name, group in groups.items()
        ),
        "group_rank": [dist.get_group_rank(group, rank) for group in groups.values()],
    }


def _too_short() -> str:
    c10d.set_timeout(dist.group.WORLD, timedelta(milliseconds=200))
    return str(error_of(total))


def late_peer() -> dict[str, Any]:
    """Interruptible waits: a late peer is waited for, a cut that Gloo has forgotten ends the wait, a timeout stays."""
    rank, size = rank_and_size()
    store = meeting_store()
    c10d.create_group(world_spec(size), rank=rank, store=dist.PrefixStore("0", store), timeout=LONG)
    down = threading.Event()
    c10d.make_waits_interruptible(down.is_set)
    if rank:
        time.sleep(0.45)  # several slices of a wait
    facts: dict[str, Any] = {"late": total()}
    if rank == 0:
        threading.Timer(0.25, down.set).start()  # no socket is shut: nothing else wakes the wait
    facts["interrupted"] = absent(store, "interrupted", lambda: error_of(total))
    down.clear()
    facts["timeout"] = absent(store, "timeout", lambda: error_of(_barrier_for_a_moment))
    return {name: described(value) for name, value in facts.items()}


def late_peer_without_slices() -> dict[str, Any]:
    """The same where a wait cannot be cut into slices: a receive, and Gloo's reduce-scatter."""
    rank, size = rank_and_size()
    store = meeting_store()
    c10d.create_group(world_spec(size), rank=rank, store=dist.PrefixStore("0", store), timeout=LONG)
    down = threading.Event()
    c10d.make_waits_interruptible(down.is_set)
    received = torch.zeros(1)
    if rank:
        time.sleep(0.2)
        dist.send(torch.ones(1), dst=0)
        time.sleep(0.2)
    else:
        dist.recv(received, src=1)
    facts: dict[str, Any] = {"received": received.item(), "scattered": _scattered()}
    if rank == 0:
        threading.Timer(0.25, down.set).start()
    facts["interrupted"] = absent(store, "interrupted", lambda: error_of(_scattered))
    return {name: described(value) for name, value in facts.items()}


def divisible() -> dict[str, Any]:
    """Collectives that get a wait in slices: whether their bits are those of torch's own, and what ends such a wait."""
    rank, size = rank_and_size()
    store = meeting_store()
    c10d.create_group(world_spec(size), rank=rank, store=dist.PrefixStore("0", store), timeout=LONG)
    inputs = _inputs(size, seed=rank)
    native, crosswise = _reduced(inputs, size), _reduced([_crosswise(inputs[0])], size)
    down = threading.Event()
    c10d.make_waits_interruptible(down.is_set)
    threads = Waiter._made
    calls: list[c10d.Collective] = []
    c10d.intercept_collectives(lambda collective: calls.append(collective) or collective.run())
    facts: dict[str, Any] = {"same": [torch.equal(one, other) for one, other in zip(native, _reduced(inputs, size))]}
    facts["threads"] = Waiter._made - threads
    facts["same without slices"] = [
        torch.equal(one, other) for one, other in zip(crosswise, _reduced([_crosswise(inputs[0])], size))
    ]
    facts["threads without slices"] = Waiter._made - threads
    dist.all_reduce(torch.zeros(1))
    dist.all_gather_single(torch.zeros(size), torch.zeros(1))
    dist.reduce_scatter_single(torch.zeros(1), torch.zeros(size))
    facts["bulky"] = [call.bulky for call in calls[-3:]]
    facts["mismatch"] = error_of(lambda: dist.reduce_scatter_single(torch.zeros(3), torch.zeros(size + 1)))
    facts["rank"] = rank
    if rank == 0:
        threading.Timer(0.25, down.set).start()
    facts["interrupted"] = absent(store, "interrupted", lambda: error_of(lambda: _reduced(inputs[:1], size)))
    facts["functional"] = absent(store, "functional", lambda: error_of(lambda: _functional_sum(torch.ones(2))))
    return {name: described(value) for name, value in facts.items()}


def _inputs(size: int, seed: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    whole = torch.randn(2 * size, 3, generator=draw)
    return [whole, whole.flatten(), whole.to(torch.bfloat16), (100 * whole).to(torch.int64)]


def _crosswise(tensor: torch.Tensor) -> torch.Tensor:
    """The same in another order of memory, which is left to torch."""
    return tensor.t().contiguous().t()


def _reduced(inputs: list[torch.Tensor], size: int) -> list[torch.Tensor]:
    results = []
    for tensor in inputs:
        average = [dist.ReduceOp.AVG] if tensor.is_floating_point() else []
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, *average):
            shape = (tensor.shape[0] // size, *tensor.shape[1:])
            results.append(torch.zeros(shape, dtype=tensor.dtype))
            dist.reduce_scatter_single(results[-1], tensor, op=op)
        results += [_functional_sum(tensor), _functional_sum(tensor, "max")]
    return results


def _functional_sum(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
    result = _functional_collectives.all_reduce(tensor, op, dist.group.WORLD)
    return result.wait() if isinstance(result, _functional_collectives.AsyncCollectiveTensor) else result


def _scattered() -> list[float]:
    part = torch.zeros(2)
    dist.reduce_scatter_single(part, torch.arange(4.0))
    return part.tolist()


def _barrier_for_a_moment() -> None:
    dist.barrier(async_op=True).wait(timedelta(milliseconds=50))


def described(value: Any) -> Any:
    """An exception's type and message; anything else as it is."""
    return (type(value).__name__, str(value)) if isinstance(value, Exception) else value


# -- communicators


def open_session(**options: Any) -> Session:
    """This rank's session."""
    rank, size = rank_and_size()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    endpoint = Endpoint.from_environment(host=host, port=port, rank=rank, world_size=size, interface=None, deadline=LONG)
    return Session.open(
        **{"endpoint": endpoint, "rank": rank, "world_size": size, "backend": "gloo", "collective_timeout": LONG,
           "rebuild_timeout": LONG, "heartbeat_deadline": 3.0, **options}
    )  # fmt: skip


def real_errors() -> dict[str, Any]:
    """What Gloo says in each way that communication fails, on rank 0; with whether it is recognised."""
    session = open_session()
    store, groups = session.control.store, session.communicators
    errors: dict[str, Any] = {}
    c10d.set_timeout(dist.group.WORLD, timedelta(milliseconds=200))
    errors["timeout"] = absent(store, "timeout", lambda: error_of(total))
    _repaired(groups, 1)
    if dist.get_rank() == 1:
        groups.links.cut()
    errors["cut"] = error_of(total)
    _repaired(groups, 2)
    errors["interrupted"] = absent(store, "interrupted", lambda: _interrupted_from_a_thread(groups, 3))
    _repaired(groups, 3)
    if dist.get_rank() == 1:
        os._exit(0)
    session.control.publish("closed/1", "")  # for rank 1: nobody has to wait for it
    errors["process gone"] = error_of(total)
    groups._rebuild_timeout = timedelta(milliseconds=300)
    groups.retire(4)
    errors["rebuilt alone"] = error_of(groups.rebuild)
    errors["store"] = error_of(lambda: store.wait(["never"], timedelta(milliseconds=50)))
    return {name: (*described(error), is_communication_error(error)) for name, error in errors.items()}


def _repaired(groups: Communicators, generation: int) -> None:
    groups.retire(generation)
    groups.rebuild()
    groups.validate()


def _interrupted_from_a_thread(groups: Communicators, before: int) -> Exception | None:
    threading.Timer(0.2, groups.interrupt, kwargs={"before": before}).start()
    return error_of(total)


def interrupts() -> dict[str, Any]:
    """A blocked all-reduce is woken on both ends; late and repeated interrupts leave the replacements alone."""
    session = open_session()
    store, groups = session.control.store, session.communicators
    facts: dict[str, Any] = {"healthy": [groups.links.healthy()]}
    pair = dist.new_group([0, 1])  # made behind the package's back, as by a library
    meet(store, "made")
    began = time.monotonic()
    woken = absent(store, "blocked", lambda: _interrupted_from_a_thread(groups, 1))
    facts["woken"] = woken is None or is_communication_error(woken)
    facts["peer"] = is_communication_error(error_of(total))  # its end is shut as well
    facts["well_before_the_timeout"] = time.monotonic() - began < LONG.total_seconds() / 2
    facts["healthy"].append(groups.links.healthy())
    facts["second"] = groups.interrupt(before=1)
    names = [spec.name for spec in c10d.registered_groups()]
    _repaired(groups, 1)
    facts["same_names"] = [spec.name for spec in c10d.registered_groups()] == names
    facts["late"] = [groups.interrupt(before=before) for before in (0, 1)]
    facts["sum"] = total()
    facts["pair_is_new"] = all(group is not pair for group in c10d.registered_groups().values())
    facts["healthy"].append(groups.links.healthy())
    meet(store, "looked")
    facts["next"] = groups.interrupt(before=2)
    return facts


def half_a_rebuild() -> dict[str, Any]:
    """A repair that is cut short after the first of two groups still knows both in the next one."""
    session = open_session()
    groups = session.communicators
    dist.new_group([0, 1])
    specs = list(c10d.registered_groups())
    meet(session.control.store, "made")
    groups.retire(1)
    original, made = groups._create, []

    def once(spec: GroupSpec) -> dist.ProcessGroup:
        if made:
            raise RuntimeError("connection reset by peer")
        made.append(spec)
        return original(spec)

    groups._create = once
    failure = error_of(groups.rebuild)
    del groups._create
    meet(session.control.store, "failed")
    retired = len(groups.retire(2))
    groups.rebuild()
    groups.validate()
    return {
        "failure": (isinstance(failure, CommunicatorLost), str(failure)),
        "retired": retired,
        "specs": list(c10d.registered_groups()) == specs,
    }

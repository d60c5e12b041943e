"""What the ranks of the recovery core's tests do: process groups, FSDP2 and communicators, without a trainer."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_accelpact.recovery import c10d, fsdp2
from lightning_accelpact.recovery.c10d import GroupSpec
from lightning_accelpact.recovery.communicator import CommunicatorLost, Communicators, is_communication_error
from lightning_accelpact.recovery.control import Endpoint
from lightning_accelpact.recovery.rebind import rebind, references
from lightning_accelpact.recovery.session import Session

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
    """Rank 0 works while the others stay away, until it is done."""
    if dist.get_rank() != 0:
        store.wait([name], LONG)
        return None
    try:
        return work()
    finally:
        store.set(name, "")


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
    return {name: _described(value) for name, value in facts.items()}


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
    return {name: _described(value) for name, value in facts.items()}


def _scattered() -> list[float]:
    part = torch.zeros(2)
    dist.reduce_scatter_single(part, torch.arange(4.0))
    return part.tolist()


def _barrier_for_a_moment() -> None:
    dist.barrier(async_op=True).wait(timedelta(milliseconds=50))


def _described(value: Any) -> Any:
    return (type(value).__name__, str(value)) if isinstance(value, Exception) else value


# -- FSDP2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Layers of a kind; the root has parameters of its own around them, or none."""

    def __init__(self, layers: int = 3, *, bare: bool = False) -> None:
        super().__init__()
        self.embed = nn.Identity() if bare else nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Identity() if bare else nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(mesh: DeviceMesh, layers: int = 3, *, bare: bool = False) -> Net:
    """The net, with the same weights everywhere, sharded block by block."""
    torch.manual_seed(0)
    net = Net(layers, bare=bare)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def hsdp() -> DeviceMesh:
    """The mesh of 2 replicas x 2 shards, made without this package."""
    dist.init_process_group("gloo", timeout=LONG)
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def micro_batch(index: int) -> torch.Tensor:
    """This rank's data."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * index + dist.get_rank()))


def accumulate(net: Net, indices: list[int]) -> None:
    """Backward passes of which the last one alone communicates gradients."""
    for index in indices:
        fsdp2.set_gradient_sync(net, index == indices[-1])
        net(micro_batch(index)).square().mean().backward()


def gradients(net: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of them."""
    return [parameter.grad.to_local().clone() for parameter in net.parameters()]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """In every bit."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class Abort(Exception):
    """Ends a pass from inside."""


def aborted(net: Net, *, backward: bool) -> bool:
    """Run a pass that ends in its middle; true if it did."""

    def abort(*_: Any) -> None:
        raise Abort

    handle = (
        net.blocks[1].register_forward_hook(lambda module, args, output: output.register_hook(abort) and None)
        if backward
        else net.blocks[1].register_forward_pre_hook(abort)
    )
    try:
        net(micro_batch(1)).sum().backward()
    except Abort:
        return True
    finally:
        handle.remove()
    return False


def fsdp_facts() -> dict[str, Any]:
    """Everything the FSDP2 adapter promises, on four ranks."""
    mesh = hsdp()
    reference = sharded(mesh)
    accumulate(reference, [0, 1])
    expected = gradients(reference)
    return {
        "before_first_forward": _reset_before_the_first_forward(mesh, expected),
        "after_abort": {way: _reset_after_an_abort(mesh, expected, way == "backward") for way in ("forward", "backward")},
        "drop": {drop: _redone(mesh, expected, drop=drop) for drop in (True, False)},
        "sync": _sync(mesh),
        "places": {layers: _places(sharded(mesh, layers)) for layers in (1, 3)},
        "places_of_a_bare_root": _places(sharded(mesh, 2, bare=True)),
        "last_reduction": {bare: _last_reduction(mesh, bare=bare) for bare in (False, True)},
        "attributes": _attributes(reference),
    }


def _reset_before_the_first_forward(mesh: DeviceMesh, expected: list[torch.Tensor]) -> bool:
    net = sharded(mesh)
    fsdp2.reset_iteration(net)
    fsdp2.drop_unsharded_gradients(net)
    accumulate(net, [0, 1])
    return equal(gradients(net), expected)


def _reset_after_an_abort(mesh: DeviceMesh, expected: list[torch.Tensor], backward: bool) -> dict[str, Any]:
    net = sharded(mesh)
    facts: dict[str, Any] = {"aborted": aborted(net, backward=backward)}
    facts["busy"] = {state._training_state.name for state in fsdp2.states(net.modules())} != {"IDLE"}
    fsdp2.reset_iteration(net)
    facts["idle"] = {state._training_state.name for state in fsdp2.states(net.modules())} == {"IDLE"}
    fsdp2.drop_unsharded_gradients(net)
    net.zero_grad(set_to_none=True)
    accumulate(net, [0, 1])
    facts["exact"] = equal(gradients(net), expected)
    return facts


def _redone(mesh: DeviceMesh, expected: list[torch.Tensor], *, drop: bool) -> dict[str, Any]:
    """An update whose second micro-batch failed, begun again with or without dropping what the first one left."""
    net = sharded(mesh)
    fsdp2.set_gradient_sync(net, False)
    net(micro_batch(0)).square().mean().backward()
    fsdp2.reset_iteration(net)
    if drop:
        fsdp2.drop_unsharded_gradients(net)
    net.zero_grad(set_to_none=True)
    accumulate(net, [0, 1])
    return {"exact": equal(gradients(net), expected)}


def _sync(mesh: DeviceMesh) -> list[bool]:
    net = sharded(mesh)
    reduces = [fsdp2.reduces_gradients(net)]
    for enabled in (False, True):
        fsdp2.set_gradient_sync(net, enabled)
        reduces.append(fsdp2.reduces_gradients(net))
    return reduces


def _places(net: Net) -> dict[str, Any]:
    holders = list(fsdp2.group_holders(net.modules()))
    return {
        "states": len(list(fsdp2.states(net.modules()))),
        "param_groups": len(list(fsdp2.param_groups(net))),
        "wrapped": len(fsdp2.wrapped_modules(net)),
        "parameters": len(fsdp2.sharded_parameters(net)),
        "meshes": len(fsdp2.meshes(net.modules())),
        "keys": sorted({key for _, key in holders}),
        "holders": len(holders),
        "references": len(list(references(net))),
    }


def _last_reduction(mesh: DeviceMesh, *, bare: bool) -> dict[str, Any]:
    """Whether the hook runs once a backward, after every other reduce-scatter and before its all-reduce."""
    net = sharded(mesh, bare=bare)
    events: list[str] = []
    fsdp2.hook_last_reduction(net, lambda: events.append("hook"))
    with _recorded(events):
        accumulate(net, [0])
    return {"events": events, "groups": len(list(fsdp2.param_groups(net)))}


@contextlib.contextmanager
def _recorded(events: list[str]) -> Iterator[None]:
    names = ("reduce_scatter_single", "all_reduce")
    originals = {name: getattr(dist, name) for name in names}

    def recorder(name: str) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            return originals[name](*args, **kwargs)

        return record

    for name in names:
        setattr(dist, name, recorder(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _attributes(net: Net) -> dict[str, list[str]]:
    """The attribute names of each kind of object that the adapter looks into."""
    state = next(iter(fsdp2.states(net.modules())))
    group = next(iter(state._fsdp_param_groups))
    kinds = {
        "FSDPModule": net, "FSDPState": state, "FSDPParamGroup": group, "FSDPParam": group.fsdp_params[0],
        "FSDPMeshInfo": group.mesh_info,
    }  # fmt: skip
    return {kind: dir(value) for kind, value in kinds.items()}


# -- rebinding


def rebind_a_model() -> dict[str, Any]:
    """Replace every group under a real model, and train on."""
    rank, size = rank_and_size()
    session = open_session()
    mesh = session.mesh("cpu", (2, 2))
    net = sharded(mesh)
    accumulate(net, [0, 1])
    expected = gradients(net)
    net.zero_grad(set_to_none=True)
    before = len(list(references(net, [mesh])))
    retired = session.communicators.retire(1)
    replacements = session.communicators.rebuild()
    missing = dict(replacements)
    del missing[mesh.get_group("shard").group_name]
    refused = error_of(lambda: rebind(list(references(net, [mesh])), retired, missing))
    count = rebind(list(references(net, [mesh])), retired, replacements)
    again = rebind(list(references(net, [mesh])), retired, replacements)
    session.communicators.validate()
    accumulate(net, [0, 1])
    return {
        "before": before,
        "refused": _described(refused),
        "census": count,
        "again": again,
        "exact": equal(gradients(net), expected),
        "groups": sorted(mesh.get_group(name).group_name for name in ("replicate", "shard")),
    }


# -- communicators


def open_session(**options: Any) -> Session:
    """This rank's session."""
    rank, size = rank_and_size()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    endpoint = Endpoint.from_environment(host=host, port=port, rank=rank, interface=None, deadline=LONG)
    return Session.open(
        **{"endpoint": endpoint, "rank": rank, "world_size": size, "backend": "gloo", "collective_timeout": LONG,
           "rebuild_timeout": LONG, **options}
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
    errors["interrupted"] = absent(store, "interrupted", lambda: error_of(lambda: _interrupted_from_a_thread(groups, 3)))
    _repaired(groups, 3)
    if dist.get_rank() == 1:
        os._exit(0)
    store.add("closed", 1)  # for rank 1: nobody has to wait for it
    errors["process gone"] = error_of(total)
    groups._rebuild_timeout = timedelta(milliseconds=300)
    groups.retire(4)
    errors["rebuilt alone"] = error_of(groups.rebuild)
    errors["store"] = error_of(lambda: store.wait(["never"], timedelta(milliseconds=50)))
    return {name: (*_described(error), is_communication_error(error)) for name, error in errors.items()}


def _repaired(groups: Communicators, generation: int) -> None:
    groups.retire(generation)
    groups.rebuild()
    groups.validate()


def _interrupted_from_a_thread(groups: Communicators, before: int) -> float:
    timer = threading.Timer(0.2, groups.interrupt, kwargs={"before": before})
    timer.start()
    return total()


def interrupts() -> dict[str, Any]:
    """A blocked all-reduce is woken on both ends; late and repeated interrupts leave the replacements alone."""
    session = open_session()
    store, groups = session.control.store, session.communicators
    facts: dict[str, Any] = {"healthy": [groups.links.healthy()]}
    pair = dist.new_group([0, 1])  # made behind the package's back, as by a library
    meet(store, "made")
    began = time.monotonic()
    woken = absent(store, "blocked", lambda: error_of(lambda: _interrupted_from_a_thread(groups, 1)))
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

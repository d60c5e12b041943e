"""What the ranks of the FSDP2 adapter's and the rebinding's tests do, without a trainer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from jobs_recovery import LONG, described, error_of, open_session
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_accelpact.recovery import fsdp2
from lightning_accelpact.recovery.rebind import rebind, references


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


def sharded(mesh: DeviceMesh, layers: int = 3, *, bare: bool = False, ignoring: bool = False) -> Net:
    """The net, with the same weights everywhere, sharded block by block.

    Args:
        mesh: Two-dimensional.
        layers: Blocks.
        bare: Without parameters in the root.
        ignoring: With two frozen layers that are left alone, of which one is made in inference mode.
    """
    torch.manual_seed(0)
    net = Net(layers, bare=bare)
    ignored: set[nn.Parameter] = set()
    if ignoring:
        net.ignored = nn.Linear(8, 8).requires_grad_(False)
        with torch.inference_mode():
            net.unmarkable = nn.Linear(8, 8).requires_grad_(False)
        ignored.update(net.ignored.parameters(), net.unmarkable.parameters())
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh, ignored_params=ignored)


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
        "after_abort": {way: _reset_after_an_abort(mesh, expected, way) for way in ("forward", "backward")},
        "drop": {drop: _redone(mesh, expected, drop=drop) for drop in (True, False)},
        "writes": _noticed_writes(mesh),
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


def _reset_after_an_abort(mesh: DeviceMesh, expected: list[torch.Tensor], way: str) -> dict[str, Any]:
    net = sharded(mesh)
    facts: dict[str, Any] = {"aborted": aborted(net, backward=way == "backward")}
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


def _halved(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value * 0.5 for name, value in state.items()}


_sharded = fsdp2.sharded_parameters
WRITES: dict[str, Callable[[Net], object]] = {
    "of one": lambda net: [parameter.mul_(0.5) for parameter in _sharded(net)],
    "of a list": lambda net: torch._foreach_mul_(_sharded(net), 0.5),
    "to the shard": lambda net: [parameter.to_local().mul_(0.5) for parameter in _sharded(net)],
    "to the data": lambda net: [parameter.data.mul_(0.5) for parameter in _sharded(net)],
    "of a list optimizer": lambda net: torch.optim.SGD(_sharded(net), lr=0.1, foreach=True).step(),
    "of a fused optimizer": lambda net: torch.optim.AdamW(_sharded(net), lr=0.1, fused=True).step(),
    "of a state": lambda net: net.blocks[1].load_state_dict(_halved(net.blocks[1].state_dict())),
    "in another's place": lambda net: net.blocks[1].load_state_dict(_halved(net.blocks[1].state_dict()), assign=True),
    "to one that FSDP ignores": lambda net: net.ignored.weight.mul_(0.5),
    "to the data of one that FSDP ignores": lambda net: net.ignored.weight.data.mul_(0.5),
}


def _noticed_writes(mesh: DeviceMesh) -> dict[str, bool]:
    """Whether a write to the weights is noticed, and that nothing is where nobody writes."""
    net = sharded(mesh, ignoring=True)
    weights, noticed = fsdp2.Weights(net), {}
    for name, write in WRITES.items():
        marks = weights()
        accumulate(net, [0, 1])
        noticed[f"before {name}"] = marks.moved
        with torch.no_grad():
            write(net)
        noticed[name] = marks.moved
        net.zero_grad()
    return noticed


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
    with recorded(events):
        accumulate(net, [0])
    return {"events": events, "groups": len(list(fsdp2.param_groups(net)))}


@contextlib.contextmanager
def recorded(events: list[str]) -> Iterator[None]:
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
        "FSDPMeshInfo": group.mesh_info, "Parameter": group.fsdp_params[0].sharded_param,
    }  # fmt: skip
    return {kind: dir(value) for kind, value in kinds.items()}


# -- rebinding


def rebind_a_model() -> dict[str, Any]:
    """Replace every group under a real model, and train on."""
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
        "refused": described(refused),
        "census": count,
        "again": again,
        "exact": equal(gradients(net), expected),
        "groups": sorted(mesh.get_group(name).group_name for name in ("replicate", "shard")),
    }

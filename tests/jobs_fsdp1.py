"""What the ranks of the FSDP1 adapter's tests do, without a trainer."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from jobs_fsdp2 import Net, equal, hsdp, micro_batch, recorded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from lightning_accelpact.recovery import fsdp1
from lightning_accelpact.recovery.rebind import references

COLLECTIVES = ("all_gather", "reduce_scatter_single", "all_reduce")  # as FSDP1 calls them on a CPU
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)

# What FSDP1 is asked for besides hybrid sharding
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "frozen": {},
    "bf16": {"mixed_precision": BF16},
    "prefetch": {"forward_prefetch": True, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
}

UNSUPPORTED: dict[str, dict[str, Any]] = {
    "": {},
    "sharding_strategy=_HYBRID_SHARD_ZERO2": {"sharding_strategy": ShardingStrategy._HYBRID_SHARD_ZERO2},
    "use_orig_params=False": {"use_orig_params": False},
    "cpu_offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "ignored_states": {"ignore": True},
}


def sharded(
    mesh: DeviceMesh, layers: int = 3, *, bare: bool = False, variant: str = "plain", **options: Any
) -> FullyShardedDataParallel:
    """The net, with the same weights everywhere, sharded block by block."""
    torch.manual_seed(0)
    net = Net(layers, bare=bare)
    if variant == "frozen":
        net.blocks[1].requires_grad_(False)
    if options.pop("ignore", False):
        options["ignored_states"] = [net.embed.weight]
    return FullyShardedDataParallel(
        net, auto_wrap_policy=ModuleWrapPolicy({type(net.blocks[0])}), device_mesh=mesh, device_id=torch.device("cpu"),
        **{"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True, **VARIANTS[variant], **options},
    )  # fmt: skip


def one_pass(net: nn.Module, index: int) -> None:
    """Forward and backward of a micro-batch."""
    net(micro_batch(index)).float().square().mean().backward()


def accumulate(net: nn.Module) -> None:
    """An update's two micro-batches, of which the last one alone communicates gradients."""
    with fsdp1.no_gradient_sync(net):
        one_pass(net, 0)
    one_pass(net, 1)


def gradients(net: nn.Module) -> list[torch.Tensor]:
    """This rank's shards of them."""
    return [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


class Abort(BaseException):
    """Ends a pass from inside, as a repair does."""


@contextlib.contextmanager
def aborting(at: int) -> Iterator[Counter]:
    """The collective of this number, from 0, ends what is being done and leaves a result that is none."""
    count = Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}

    def aborter(name: str) -> Callable[..., Any]:
        def call(output: Any, *args: Any, **kwargs: Any) -> Any:
            count["begun"] += 1
            if count["begun"] > at >= 0:
                for tensor in output if isinstance(output, list) else [output]:
                    tensor.detach().fill_(torch.nan)
                raise Abort
            return originals[name](output, *args, **kwargs)

        return call

    for name in COLLECTIVES:
        setattr(dist, name, aborter(name))
    try:
        yield count
    except Abort:
        count["aborted"] += 1
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def states(net: nn.Module) -> set[str]:
    """In which states the units and their handles are."""
    units = fsdp1.wrapped_modules(net)
    return {unit.training_state.name for unit in units} | {one._training_state.name for one in fsdp1.handles(net)}


def fsdp1_facts() -> dict[str, Any]:
    """Everything the FSDP1 adapter promises, on four ranks."""
    mesh = hsdp()
    reference = sharded(mesh)
    accumulate(reference)
    return {
        "before_first_forward": _reset_before_the_first_forward(mesh, gradients(reference)),
        "aborted": {variant: _aborted_everywhere(mesh, variant) for variant in VARIANTS},
        "kept": _gradients_are_kept(mesh),
        "dropped": {drop: _redone(mesh, drop=drop) for drop in (True, False)},
        "state_dict": _aborted_state_dict(mesh),
        "orphans": [len(fsdp1.orphans(reference)), len(fsdp1.orphans(reference.module)), len(fsdp1.orphans(Net()))],
        "unsupported": {name: fsdp1.unsupported(sharded(mesh, **options)) for name, options in UNSUPPORTED.items()},
        "written": {variant: _written(mesh, variant) for variant in VARIANTS},
        "sync": _sync(mesh),
        "places": {layers: _places(sharded(mesh, layers), mesh) for layers in (1, 3)},
        "places_of_a_bare_root": _places(sharded(mesh, 2, bare=True), mesh),
        "last_reduction": {bare: _last_reduction(mesh, bare=bare) for bare in (False, True)},
        "attributes": _attributes(reference),
    }


def _reset_before_the_first_forward(mesh: DeviceMesh, expected: list[torch.Tensor]) -> bool:
    net = sharded(mesh)
    fsdp1.reset_iteration(net)
    fsdp1.drop_unsharded_gradients(net)
    accumulate(net)
    return equal(gradients(net), expected)


def _aborted_everywhere(mesh: DeviceMesh, variant: str) -> dict[str, Any]:
    """An update that ends in each of its collectives, is reset, and runs again; first on a net that has not run yet."""
    fresh = sharded(mesh, variant=variant)
    with aborting(-1) as count:
        accumulate(fresh)
    expected, collectives = gradients(fresh), count["begun"]
    net = sharded(mesh, variant=variant)
    facts = {"collectives": collectives, "aborted": 0, "busy": 0, "idle": 0, "clean": 0, "exact": 0}
    for at in range(collectives):
        with aborting(at) as count:
            accumulate(net)
        facts["aborted"] += count["aborted"]
        facts["busy"] += states(net) != {"IDLE"}
        fsdp1.reset_iteration(net)
        fsdp1.drop_unsharded_gradients(net)
        facts["idle"] += states(net) == {"IDLE"}
        facts["clean"] += not fsdp1.holds_gradients(net)
        accumulate(net)
        facts["exact"] += equal(gradients(net), expected)
        net.zero_grad(set_to_none=True)
    return facts


def _gradients_are_kept(mesh: DeviceMesh) -> dict[str, int]:
    """An evaluation between two micro-batches ends in each of its collectives, and the update goes on."""
    reference = sharded(mesh)
    accumulate(reference)
    expected = gradients(reference)
    facts = {"aborted": 0, "exact": 0}
    for at in range(4):
        net = sharded(mesh)
        with fsdp1.no_gradient_sync(net):
            one_pass(net, 0)
        with aborting(at) as count, torch.no_grad():
            net(micro_batch(7))
        facts["aborted"] += count["aborted"]
        fsdp1.reset_iteration(net)
        one_pass(net, 1)
        facts["exact"] += equal(gradients(net), expected)
    return facts


def _redone(mesh: DeviceMesh, *, drop: bool) -> bool:
    """Whether an update whose second micro-batch failed is right if what the first one left is dropped, or is not."""
    net = sharded(mesh)
    accumulate(net)
    expected = gradients(net)
    net.zero_grad(set_to_none=True)
    with fsdp1.no_gradient_sync(net):
        one_pass(net, 0)
    with aborting(1):
        one_pass(net, 1)
    fsdp1.reset_iteration(net)
    if drop:
        fsdp1.drop_unsharded_gradients(net)
    accumulate(net)
    return equal(gradients(net), expected)


def _aborted_state_dict(mesh: DeviceMesh) -> dict[str, int]:
    """A state dict that ends in each of its all-gathers; afterwards it is whole, and training goes on as ever."""
    net = sharded(mesh)
    accumulate(net)
    expected, weights = gradients(net), net.state_dict()
    facts = {"aborted": 0, "whole": 0, "exact": 0}
    for at in range(4):
        with aborting(at) as count:
            net.state_dict()
        facts["aborted"] += count["aborted"]
        fsdp1.reset_iteration(net)
        again = net.state_dict()
        facts["whole"] += all(torch.equal(again[name], weight) for name, weight in weights.items())
        net.zero_grad(set_to_none=True)
        accumulate(net)
        facts["exact"] += equal(gradients(net), expected)
    return facts


def _written(mesh: DeviceMesh, variant: str) -> list[bool]:
    """Whether a write to the weights is noticed: after the passes of an update, and after an optimizer's step."""
    net = sharded(mesh, variant=variant)
    marks = fsdp1.Weights(net)()
    accumulate(net)
    found = [marks.moved]
    torch.optim.AdamW(net.parameters(), lr=0.1, foreach=True).step()
    return [*found, marks.moved]


def _sync(mesh: DeviceMesh) -> list[bool]:
    net = sharded(mesh)
    reduces = [fsdp1.reduces_gradients(net)]
    with fsdp1.no_gradient_sync(net):
        reduces.append(fsdp1.reduces_gradients(net))
    return [*reduces, fsdp1.reduces_gradients(net)]


def _places(net: nn.Module, mesh: DeviceMesh) -> dict[str, Any]:
    one_pass(net, 0)  # the execution order names a group once it is initialized
    found = references(net, [mesh], wrapper=fsdp1)
    return {
        "units": len(fsdp1.wrapped_modules(net)),
        "handles": len(fsdp1.handles(net)),
        "shards": len(fsdp1.shards(net)),
        "meshes": len(fsdp1.meshes(net.modules())),
        "inter_node": sum(reference.group is mesh.get_group("replicate") for reference in found),
        "keys": dict(Counter(reference.key for reference in found if reference.key.startswith(("_", "process")))),
        "references": len(found),
    }


def _last_reduction(mesh: DeviceMesh, *, bare: bool) -> dict[str, Any]:
    """Whether the hook runs once a backward, after every other reduce-scatter and before its all-reduce."""
    net = sharded(mesh, bare=bare)
    events: list[str] = []
    fsdp1.hook_last_reduction(net, lambda: events.append("hook"))
    with recorded(events):
        one_pass(net, 0)
    return {"events": events, "handles": len(fsdp1.handles(net))}


def _attributes(net: FullyShardedDataParallel) -> dict[str, list[str]]:
    """The attribute names of each kind of object that the adapter looks into, in the middle of a pass."""
    kinds: dict[str, list[str]] = {}

    def look(*_: Any) -> None:
        handle = net._handle
        values = {
            "FullyShardedDataParallel": net, "FlatParamHandle": handle, "FlatParameter": handle.flat_param,
            "_ExecOrderData": net._exec_order_data, "_FreeEventQueue": net._free_event_queue,
        }  # fmt: skip
        kinds.update({kind: dir(value) for kind, value in values.items()})

    net.register_forward_hook(look)
    net.zero_grad(set_to_none=True)
    with aborting(1_000_000):
        one_pass(net, 0)
    return kinds

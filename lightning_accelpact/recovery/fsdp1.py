"""The one file that touches private attributes of FSDP1 (``torch.distributed.fsdp.FullyShardedDataParallel``).

Checked against torch 2.13. It offers what :mod:`.fsdp2` offers, under the same names. ``tests/recovery/test_fsdp1.py``
fails loudly when one of the attributes moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp._common_utils import FSDP_FLATTENED, TrainingState
from torch.distributed.fsdp._flat_param import HandleTrainingState
from torch.distributed.utils import _free_storage

from lightning_accelpact.recovery.contents import Marks, sampled
from lightning_accelpact.recovery.modules import walk

CHECKED_TORCH = ("2.13",)

HOOK_STATES = ("_inter_node_state", "_comm_hook_state")

# What a handle sets during a pass and its post-backward callback would clear
_FLAGS = ("_needs_pre_forward_unshard", "_needs_pre_backward_unshard", "_prefetched", "_ran_pre_backward_hook")


class Slots(MutableMapping[str, Any]):
    """The attributes of an object that keeps them in slots, as a mapping.

    Args:
        owner: The object.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        return getattr(self._owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        names = chain.from_iterable(getattr(cls, "__slots__", ()) for cls in type(self._owner).__mro__)
        return (name for name in names if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


def wrapped_modules(root: torch.nn.Module) -> list[FullyShardedDataParallel]:
    """The FSDP units below ``root``, outermost first."""
    return list(_units(walk(root)))


def _units(modules: Iterable[torch.nn.Module]) -> Iterator[FullyShardedDataParallel]:
    return (module for module in modules if isinstance(module, FullyShardedDataParallel))


def handles(root: torch.nn.Module) -> list[Any]:
    """The handle of every unit that has parameters of its own."""
    return [unit._handle for unit in wrapped_modules(root) if unit._handle is not None]


def unsupported(root: torch.nn.Module) -> str:
    """What a unit has that repairs have not been proven with; empty if nothing."""
    for unit in wrapped_modules(root):
        if unit.sharding_strategy is not ShardingStrategy.HYBRID_SHARD:
            return f"sharding_strategy={unit.sharding_strategy.name}: it must be HYBRID_SHARD"
        if not unit._use_orig_params:
            return "use_orig_params=False: it must be True"
        if unit.cpu_offload.offload_params:
            return "cpu_offload: parameters must stay on the device"
        if unit._comm_hook is not None:
            return "a communication hook: there must be none"
    if not all(getattr(parameter, FSDP_FLATTENED, False) for parameter in root.parameters()):
        return "ignored_states: the gradients of these parameters would not be averaged"
    return ""


def orphans(root: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Parameters that belong to a unit which is not below ``root``: what is there of them is a shard."""
    flats = [handle.flat_param for handle in handles(root)]
    known = {id(one) for flat in flats for one in (flat, *(flat._params or ()), *(flat._shared_params or ()))}
    flattened = [parameter for parameter in root.parameters() if getattr(parameter, FSDP_FLATTENED, False)]
    return [one for one in flattened if id(one) not in known]


# -- a pass that was cut short


def reset_iteration(root: torch.nn.Module) -> None:
    """Bring FSDP back to IDLE after a forward or backward that was cut short; gradients of parameters stay.

    FSDP initializes lazily, so before the first forward there is nothing to reset yet.
    """
    for unit in wrapped_modules(root):
        _end_unshard_contexts(unit)
        unit.training_state = TrainingState.IDLE
        unit._unshard_event = None
        unit._free_event_queue._queue.clear()
        if unit._is_root:
            unit._post_backward_callback_queued = False
            unit._exec_order_data.handles_post_forward_order.clear()
            unit._exec_order_data.current_order_index = 0
        if unit._is_root is not None and unit._handle is not None:
            _reset_handle(unit._handle)


def _end_unshard_contexts(unit: FullyShardedDataParallel) -> None:
    """Leave the contexts that a state dict's hooks have entered: their other halves have not been called."""
    while unit._unshard_params_ctx:
        _, context = unit._unshard_params_ctx.popitem()
        context.__exit__(None, None, None)


@torch.no_grad()
def _reset_handle(handle: Any) -> None:
    flat = handle.flat_param
    handle._training_state = HandleTrainingState.IDLE
    handle._post_forward_index = None
    for name in _FLAGS:
        setattr(handle, name, False)
    if hasattr(flat, "_post_backward_hook_state"):  # else the next forward would not register its own
        flat._post_backward_hook_state[-1].remove()
        del flat._post_backward_hook_state
    flat._tensors[:] = [None] * len(flat._tensors)
    handle.reshard(True)  # an all-gather that was cut short leaves its half-written result behind as if it were whole
    for name in ("_full_prec_full_param_padded", "_mp_shard"):
        if hasattr(flat, name):
            _free_storage(getattr(flat, name))


def drop_unsharded_gradients(root: torch.nn.Module) -> None:
    """Drop every gradient: reduced ones, those of micro-batches without gradient sync, and what FSDP keeps aside."""
    for handle in handles(root):
        flat = handle.flat_param
        flat.grad = None
        flat._post_backward_called = False
        if hasattr(flat, "_saved_grad_shard"):
            del flat._saved_grad_shard
        for parameter in chain(flat._params, flat._shared_params):
            parameter.grad = None


def holds_gradients(root: torch.nn.Module) -> bool:
    """Whether backward passes have left gradients, those of micro-batches without gradient sync included."""
    flats = [handle.flat_param for handle in handles(root)]
    kept = any(flat.grad is not None or hasattr(flat, "_saved_grad_shard") for flat in flats)
    return kept or any(parameter.grad is not None for parameter in root.parameters())


def gradients_are(root: torch.nn.Module, doubtful: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Whether nobody has read the results of these all-reduces: FSDP1 divides each as soon as it is there."""
    return False


# -- gradient sync, weights and clipping


@contextmanager
def no_gradient_sync(root: torch.nn.Module) -> Iterator[None]:
    """No gradient communication inside, for a micro-batch that is not the update's last."""
    with ExitStack() as stack:
        for unit in FullyShardedDataParallel.fsdp_modules(root, root_only=True):
            stack.enter_context(unit.no_sync())
        yield


def reduces_gradients(root: torch.nn.Module) -> bool:
    """Whether the next backward pass reduces gradients, that is, belongs to the update's last micro-batch."""
    return all(unit._sync_gradients for unit in wrapped_modules(root))


def shards(root: torch.nn.Module) -> list[torch.Tensor]:
    """This rank's shards of all parameters."""
    return [handle.flat_param.detach() for handle in handles(root)]


class Weights:
    """Marks this rank's shards of all parameters: a few of their values, since FSDP1's own views are not counted as one.

    Args:
        root: The outermost unit.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root

    def __call__(self) -> Marks:
        return Marks(samples=self._samples)

    @cached_property
    def _samples(self) -> list[list[torch.Tensor]]:
        flats = (handle.flat_param for handle in handles(self._root))
        return sampled(getattr(flat, "_local_shard", flat) for flat in flats)  # there is none before the first forward


# -- communicators


def meshes(modules: Iterable[torch.nn.Module]) -> list[DeviceMesh]:
    """Every device mesh that these modules' units name, each once."""
    found = (unit._device_mesh for unit in _units(modules))
    return list({id(mesh): mesh for mesh in found if mesh is not None}.values())


def group_holders(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[MutableMapping[str, Any], str]]:
    """Every place in these modules' units that names a process group, as (attributes, key), each once."""
    seen: set[int] = set()
    for unit in _units(modules):
        for owner in (unit, unit._handle, unit._exec_order_data, *(getattr(unit, name, None) for name in HOOK_STATES)):
            if owner is not None and id(owner) not in seen:
                seen.add(id(owner))
                attributes = vars(owner) if hasattr(owner, "__dict__") else Slots(owner)
                keys = [key for key, value in attributes.items() if isinstance(value, dist.ProcessGroup)]
                yield from ((attributes, key) for key in keys)


def hook_last_reduction(root: torch.nn.Module, hook: Callable[[], None]) -> None:
    """Call ``hook`` between the reduce-scatter and the all-reduce of the unit that backward reduces last."""
    unit = next(unit for unit in wrapped_modules(root) if unit._handle is not None)

    class Hooked(type(unit)):
        @property
        def _inter_node_pg(self) -> dist.ProcessGroup:  # read nowhere else in a pass
            if self.training_state is TrainingState.FORWARD_BACKWARD:
                hook()
            return vars(self)["_inter_node_pg"]

    unit.__class__ = Hooked

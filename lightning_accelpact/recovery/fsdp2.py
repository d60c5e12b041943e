"""The one file that touches private attributes of FSDP2 (``torch.distributed.fsdp.fully_shard``, torch 2.13).

``tests/recovery/test_fsdp2.py`` fails loudly when one of the attributes moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from operator import is_not
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from lightning_accelpact.recovery.contents import Marks, sampled
from lightning_accelpact.recovery.modules import walk

CHECKED_TORCH = ("2.13",)

GROUP_ATTRIBUTES = ("shard_process_group", "replicate_process_group", "reduce_scatter_process_group")


def states(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    """The FSDP state of every wrapped module among these, each once."""
    seen: set[int] = set()
    for module in modules:
        if isinstance(module, FSDPModule) and id(state := module._get_fsdp_state()) not in seen:
            seen.add(id(state))
            yield state


def param_groups(root: torch.nn.Module) -> Iterator[Any]:
    """Every FSDP parameter group below ``root``; a wrapped module without parameters of its own has none."""
    yield from _param_groups(walk(root))


def _param_groups(modules: Iterable[torch.nn.Module]) -> Iterator[Any]:
    for state in states(modules):
        yield from state._fsdp_param_groups


def wrapped_modules(root: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules that FSDP wraps, outermost first."""
    return [module for module in walk(root) if isinstance(module, FSDPModule)]


def register_forward_method(module: torch.nn.Module, name: str) -> None:
    """Let FSDP gather a module's parameters in this method, too; a second time, as in a second run, changes nothing.

    torch would wrap it once more, and each wrapper hides one argument from ``inspect.signature``.
    """
    if not hasattr(vars(module).get(name), "__wrapped__"):
        register_fsdp_forward_method(module, name)


def reset_iteration(root: torch.nn.Module) -> None:
    """Bring FSDP back to IDLE after a forward or backward that was cut short; gradients of parameters stay.

    FSDP initializes lazily, so before the first forward there is nothing to reset yet.
    """
    for group in param_groups(root):
        # Its Work sits on the retired communicator, where the wait of reset_iter_state() would raise
        group._all_gather_result = None
    for module in wrapped_modules(root):
        if module._get_fsdp_state()._is_root:
            module.reset_iter_state()


def drop_unsharded_gradients(root: torch.nn.Module) -> None:
    """Drop what micro-batches without gradient sync have left behind.

    ``reset_iter_state()`` of torch 2.13 says that it does this and does not; without it the next update is wrong.
    """
    for group in param_groups(root):
        for param in group.fsdp_params:
            param.unsharded_accumulated_grad = None
            unsharded = getattr(param, "_unsharded_param", None)
            if unsharded is not None:
                unsharded.grad = None


def set_gradient_sync(root: torch.nn.Module, enabled: bool) -> None:
    """Whether backward passes reduce gradients, for every FSDP root below ``root``."""
    for module in wrapped_modules(root):
        module.set_requires_gradient_sync(enabled, recurse=False)


@contextmanager
def no_gradient_sync(root: torch.nn.Module, enabled: bool = True) -> Iterator[None]:
    """No gradient communication inside, for a micro-batch that is not the update's last.

    Args:
        root: The outermost module.
        enabled: False changes nothing.
    """
    set_gradient_sync(root, not enabled)
    try:
        yield
    finally:
        set_gradient_sync(root, True)


def holds_gradients(root: torch.nn.Module) -> bool:
    """Whether backward passes have left gradients, those of micro-batches without gradient sync included."""
    params = [param for group in param_groups(root) for param in group.fsdp_params]
    unsharded = [getattr(param, "_unsharded_param", None) for param in params]
    gradients = (parameter.grad for parameter in (*root.parameters(), *unsharded) if parameter is not None)
    return any(gradient is not None for gradient in (*gradients, *(p.unsharded_accumulated_grad for p in params)))


def gradients_are(root: torch.nn.Module, doubtful: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
    """Whether the sharded gradients are views of ``results``, and ``doubtful`` ones of these became nothing else.

    They are not where FSDP casts, accumulates or offloads what it has reduced. A hook on a gradient may have read it.
    """
    parameters = [param.sharded_param for group in param_groups(root) for param in group.fsdp_params]
    gradients = {_storage(parameter.grad.to_local()) for parameter in parameters if parameter.grad is not None}
    hooked = any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters)
    return not hooked and {_storage(one) for one in doubtful} <= gradients <= {_storage(one) for one in results}


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def reduces_gradients(root: torch.nn.Module) -> bool:
    """Whether the next backward pass reduces gradients, that is, belongs to the update's last micro-batch."""
    return all(group.reduce_grads for group in param_groups(root))


def sharded_parameters(root: torch.nn.Module) -> list[torch.Tensor]:
    """Every parameter that is a DTensor, each once."""
    return [parameter for parameter in root.parameters() if isinstance(parameter, DTensor)]


def shards(root: torch.nn.Module) -> list[torch.Tensor]:
    """This rank's shards of all parameters."""
    return [parameter.to_local().detach() for parameter in sharded_parameters(root)]


class Weights:
    """Marks every parameter of a wrapped model, and of the sharded ones this rank's part.

    Those that are registered with the modules will not do: inside a pass they may be the unsharded ones.

    Args:
        root: The model; its parameters are looked for once, when they are to be marked first.
    """

    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._parts: list[torch.Tensor] = []

    def __call__(self) -> Marks:
        whole = self._whole()
        parts = [getattr(one, "_local_tensor", one) for one in whole]
        if any(map(is_not, parts, self._parts)) or len(parts) != len(self._parts):  # FSDP puts others in place
            self._parts, self._samples = parts, sampled(parts)
        return Marks((*whole, *parts), self._samples, self._whole)

    def _whole(self) -> list[torch.Tensor]:
        return [*(param.sharded_param for param in self._params), *self._others]

    @cached_property
    def _params(self) -> list[Any]:
        return [param for group in param_groups(self._root) for param in group.fsdp_params]

    @cached_property
    def _others(self) -> list[torch.Tensor]:
        """Those that FSDP has been told to ignore, or that are in no wrapped module."""
        # One of the two is registered at a time
        sharded = {id(param.sharded_param) for param in self._params}
        unsharded = {id(getattr(param, "_unsharded_param", None)) for param in self._params}
        rest = [one for one in self._root.parameters() if id(one) not in sharded | unsharded]
        return [one for one in rest if not (is_lazy(one) or one.is_inference())]  # which cannot be marked


def meshes(modules: Iterable[torch.nn.Module]) -> list[DeviceMesh]:
    """Every device mesh that these modules' FSDP states or sharded parameters name, each once."""
    found: dict[int, DeviceMesh] = {}
    for group in _param_groups(modules):
        for info in _mesh_infos(group):
            found[id(info.mesh)] = info.mesh
            if info.spmd_mesh is not None:
                found[id(info.spmd_mesh)] = info.spmd_mesh
        for param in group.fsdp_params:
            mesh = param.sharded_param.device_mesh
            found[id(mesh)] = mesh
    return list(found.values())


def group_holders(modules: Iterable[torch.nn.Module]) -> Iterator[tuple[dict[str, Any], str]]:
    """Every place in these modules' FSDP states that names a process group, as (attribute dictionary, key)."""
    seen: set[int] = set()
    for group in _param_groups(modules):
        for info in _mesh_infos(group):
            if id(info) not in seen:
                seen.add(id(info))
                attributes = vars(info)
                yield from ((attributes, name) for name in GROUP_ATTRIBUTES if attributes.get(name) is not None)
        for comm in (group._all_gather_comm, group._reduce_scatter_comm):
            attributes = getattr(comm, "__dict__", {})
            yield from ((attributes, key) for key, value in attributes.items() if isinstance(value, dist.ProcessGroup))


def _mesh_infos(group: Any) -> list[Any]:
    infos = (group.mesh_info, group.post_forward_mesh_info)
    return [info for info in infos if info is not None]


def hook_last_reduction(root: torch.nn.Module, hook: Callable[[], None]) -> None:
    """Call ``hook`` between the reduce-scatter and the all-reduce of the group that backward reduces last."""
    group = next(param_groups(root))
    reduce_scatter = group._reduce_scatter_comm

    class Hooked(type(reduce_scatter)):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            work = super().__call__(*args, **kwargs)
            hook()
            return work

    group._reduce_scatter_comm = Hooked.__new__(Hooked)
    vars(group._reduce_scatter_comm).update(vars(reduce_scatter))

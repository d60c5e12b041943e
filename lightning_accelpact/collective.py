"""Fabric's collective layer, made resilient: what fails outside an update is repaired and run again by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives import TorchCollective

from lightning_accelpact.recovery.contents import overwrite
from lightning_accelpact.recovery.operation import Operations

_IN_PLACE = (
    "all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all",
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "barrier",
)  # fmt: skip


class ResilientCollective(TorchCollective):
    """Fabric's collectives over all ranks, each one run until every rank has finished it.

    Args:
        operations: Numbers, votes and repairs.
    """

    def __init__(self, operations: Operations) -> None:
        super().__init__()
        self.operations = operations

    @property
    def group(self) -> Any:
        """The default group; never kept, since a repair replaces it."""
        return dist.group.WORLD


def _resilient(name: str) -> Callable[..., Any]:
    plain = getattr(TorchCollective, name)

    def method(self: ResilientCollective, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
        kept = [tensor.clone() for tensor in tensors]

        def rewind() -> None:
            for tensor, content in zip(tensors, kept, strict=True):
                overwrite(tensor, content)

        return self.operations.run(lambda: plain(self, *args, **kwargs), rewind=rewind)

    method.__name__ = name
    method.__doc__ = plain.__doc__
    return method


for _name in _IN_PLACE:
    setattr(ResilientCollective, _name, _resilient(_name))

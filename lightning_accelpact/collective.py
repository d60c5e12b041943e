"""Fabric's collective layer, made resilient: what fails outside an update is repaired and run again by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.collectives import TorchCollective
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_accelpact.recovery import c10d
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
                tensor.copy_(content)

        return self.operations.run(lambda: plain(self, *args, **kwargs), rewind=rewind)

    method.__name__ = name
    method.__doc__ = plain.__doc__
    return method


for _name in _IN_PLACE:
    setattr(ResilientCollective, _name, _resilient(_name))


class MetricSync:
    """torchmetrics' own gathering of a state over the ranks, as one operation.

    A metric keeps it as its ``dist_sync_fn`` and may be copied or pickled with it; copies are plain.
    """

    def __init__(self, operations: Operations | None = None) -> None:
        self._operations = operations

    def __call__(self, result: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
        if self._operations is None:
            return gather_all_tensors(result, group)
        return self._operations.run(lambda: gather_all_tensors(result, c10d.current(group)))

    def __deepcopy__(self, memo: dict[int, Any]) -> MetricSync:
        return MetricSync(self._operations)

    def __reduce__(self) -> tuple[type[MetricSync], tuple[()]]:
        return MetricSync, ()

"""torchmetrics' gathering over the ranks, made resilient."""

from __future__ import annotations

from typing import Any

import torch
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_accelpact.recovery import c10d
from lightning_accelpact.recovery.operation import Operations


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
